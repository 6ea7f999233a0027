"""KV blocks: which are free, and who holds how many."""

from __future__ import annotations

from collections import deque


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class BlockManager:
    """Blocks 1 .. num_blocks - 1 of the KV cache. Block 0 is never given out: padded rows of a graph write there.

    Blocks are counted by reference, so that sequences can share one.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks {num_blocks}: at least 2 are needed, block 0 is kept for padding")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = deque(range(1, num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Part of the blocks in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def missing(self, block_table: list[int], num_tokens: int) -> int:
        """How many blocks must be added to the table for it to hold num_tokens."""
        return max(0, self.blocks_for(num_tokens) - len(block_table))

    def grow(self, block_table: list[int], num_tokens: int) -> None:
        """Add blocks until the table holds num_tokens. Raises OutOfBlocks; nothing has changed then."""
        need = self.missing(block_table, num_tokens)
        if need > self.num_free:
            raise OutOfBlocks(f"{need} blocks needed, {self.num_free} of {self.num_usable} free")
        for _ in range(need):
            block = self._free.popleft()
            self._refs[block] = 1
            block_table.append(block)

    def free(self, block_table: list[int]) -> None:
        """Give all blocks of the table back and empty it. Raises RuntimeError for a block that nobody holds."""
        for block in reversed(block_table):
            if self._refs[block] < 1:
                raise RuntimeError(f"block {block} is freed twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)
        block_table.clear()
