"""KV blocks: which are free, how many sequences hold each, and which contain a known prefix.

A full block is named by a hash of its tokens and all tokens before them. It keeps its name after its last holder has
freed it, until the block is needed again; the block freed first is reused first.

Layers with a sliding window have blocks of their own. Their sequences give back the blocks that no later query sees; 0,
the reserved block, takes their places in the block table.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Protocol


class OutOfBlocks(RuntimeError):
    """More blocks were requested than are free."""


def hash_block(parent: bytes, token_ids: Sequence[int], media: bytes = b"") -> bytes:
    """The name of a full block that follows the block `parent` (salt_root at the start of a sequence).

    media: what stands for the media in the block, whose tokens are all the same
    """
    return _digest(parent + array("i", token_ids).tobytes() + media)


class BlockNames:
    """Names the blocks of sequences. Prompts repeat, so it keeps the names of spans of SPAN blocks.

    A span is found by one hash of its tokens and of the block before it. A prompt of 128K tokens in blocks of 16 takes
    3 ms if they are known, and 9 ms if they are not.
    """

    SPAN, MOST = 64, 4096  # blocks of a span; spans that are kept

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._spans: OrderedDict[bytes, list[bytes]] = OrderedDict()  # the one used last at the end

    def extend(
        self, names: list[bytes], num_blocks: int, root: bytes, tokens: Callable[[int, int], Sequence[int]],
        media: Callable[[int, int], bytes],
    ) -> None:  # fmt: skip
        """Extend `names` to num_blocks blocks of a sequence.

        tokens, media  of (start, stop): the token ids, and what stands for the media among them
        """
        while len(names) < num_blocks:
            first, parent = len(names), names[-1] if names else root
            count = min(self.SPAN - first % self.SPAN, num_blocks - first)
            start, stop = first * self.block_size, (first + count) * self.block_size
            data = array("i", tokens(start, stop)).tobytes()
            if count < self.SPAN:
                names += self._of(parent, data, start, stop, media)
                continue
            span = _digest(parent + data + media(start, stop))
            found = self._spans.get(span)
            if found is None:
                found = self._spans[span] = self._of(parent, data, start, stop, media)
                if len(self._spans) > self.MOST:
                    self._spans.popitem(last=False)
            else:
                self._spans.move_to_end(span)
            names += found

    def _of(
        self, parent: bytes, data: bytes, start: int, stop: int, media: Callable[[int, int], bytes]
    ) -> list[bytes]:
        """Names of the blocks of tokens start .. stop - 1, whose bytes are `data`."""
        found, size, step = [], 4 * self.block_size, self.block_size
        some = bool(media(start, stop))
        for i in range((stop - start) // step):
            at = start + i * step
            parent = _digest(
                parent + data[i * size : (i + 1) * size] + (media(at, at + step) if some else b"")
            )
            found.append(parent)
        return found


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def salt_root(cache_salt: str | None) -> bytes:
    """The `parent` of a sequence's first block. Blocks are shared only between requests with the same salt."""
    return (
        b""
        if cache_salt is None
        else blake2b(cache_salt.encode(), digest_size=16, person=b"cache_salt").digest()
    )


class BlockManager:
    """Allocates blocks 1 .. num_blocks - 1. Block 0 is reserved: padded rows of a CUDA graph write there.

    window: the number of tokens that a query of these layers sees, itself included; None: all.
    epoch: number of resets. A sequence admitted in an earlier one names no more blocks: its keys depend on those from
    before the reset.
    on_forget: called with each name that a reused block loses.
    """

    on_forget: Callable[[bytes], Any] | None = None

    def __init__(
        self, num_blocks: int, block_size: int, enable_caching: bool = True, window: int | None = None
    ):
        if num_blocks < 2:
            raise ValueError(f"num_blocks {num_blocks}: at least 2 are needed, block 0 is kept for padding")
        self.num_blocks, self.block_size, self.enable_caching = num_blocks, block_size, enable_caching
        self.window = window
        self.epoch = 0
        self._free = deque(range(1, num_blocks))  # without a name
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free but named, oldest first
        self._refs = [0] * num_blocks
        self._name: list[bytes | None] = [None] * num_blocks
        self._block: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Free blocks, including those with a known prefix."""
        return len(self._free) + len(self._evictable)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Blocks with a known prefix."""
        return len(self._block)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_unseen(self, num_tokens: int) -> int:
        """The number of first blocks that no query after the first num_tokens tokens sees."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // self.block_size

    def known_prefix(self, names: Sequence[bytes], limit: int) -> int:
        """The largest number of blocks, up to `limit`, of which all that later queries see are known."""
        if self.window is None:
            known = list(map(self._block.__contains__, names[:limit]))
            return limit if all(known) else known.index(False)
        end = limit
        for i in range(limit - 1, -1, -1):
            if i < self.num_unseen(end * self.block_size):
                break
            if names[i] not in self._block:
                end = i
        return end

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix, without holding them; 0 for those that no later query sees."""
        if self.window is None:
            try:
                return list(map(self._block.__getitem__, names))
            except KeyError:
                pass
        names = names[: self.known_prefix(names, len(names))]
        unseen = self.num_unseen(len(names) * self.block_size)
        return [0] * unseen + list(map(self._block.__getitem__, names[unseen:]))

    def knows(self, name: bytes) -> bool:
        """Whether a block has this name."""
        return name in self._block

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are held. Holding one of the others reduces num_free."""
        refs = self._refs
        return sum([refs[b] > 0 for b in blocks if b])

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold found blocks, possibly shared. They must not be written."""
        refs, evictable = self._refs, self._evictable
        for block in filter(None, blocks):
            if refs[block] == 0:
                del evictable[block]
            refs[block] += 1

    def grow(self, block_table: list[int], num_tokens: int) -> None:
        """Add blocks until the table holds num_tokens. Raises OutOfBlocks without any change."""
        need = self.blocks_for(num_tokens) - len(block_table)
        if need > self.num_free:
            raise OutOfBlocks(f"{need} blocks needed, {self.num_free} of {self.num_usable} free")
        for _ in range(need):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            block_table.append(block)

    def name(self, block: int, name: bytes) -> None:
        """Name a full, held block, unless another block has that name already."""
        self.name_all((block,), (name,))

    def name_all(self, blocks: Iterable[int], names: Iterable[bytes]) -> None:
        """Name full, held blocks, except those whose name another block has already."""
        if not self.enable_caching:
            return
        of_block, of_name = self._name, self._block
        for block, name in zip(blocks, names, strict=True):
            if name not in of_name:
                of_block[block] = name
                of_name[name] = block

    def free(self, block_table: list[int]) -> None:
        """Free all blocks of the table and empty it. Raises RuntimeError for a block that is not held."""
        self._free_each(block_table)
        block_table.clear()

    def free_first(self, block_table: list[int], count: int) -> None:
        """Free the first `count` blocks of the table; 0 takes their places."""
        first = block_table[:count]
        block_table[:count] = [0] * count
        self._free_each(first)

    def _free_each(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # a prefix is reused after the blocks that follow it
            if block == 0:
                continue
            if self._refs[block] < 1:
                raise RuntimeError(f"block {block} is freed twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._name[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def reset_cache(self) -> None:
        """Forget all names. Held blocks stay with their holders but are no longer found."""
        self.epoch += 1
        for block in list(self._block.values()):
            self._forget(block)
        self._free.extend(self._evictable)
        self._evictable.clear()

    def _forget(self, block: int) -> None:
        name = self._name[block]
        if name is not None:
            del self._block[name]
            self._name[block] = None
            if self.on_forget is not None:
                self.on_forget(name)


class PrefixCache(Protocol):
    """A part of the prefix cache: blocks of a group of layers, or snapshots of states."""

    def known_prefix(self, names: Sequence[bytes], limit: int) -> int:
        """The largest number of blocks, up to `limit`, after which a sequence can go on from what is known."""
        ...


def known_prefix(groups: Sequence[PrefixCache], names: Sequence[bytes]) -> int:
    """The largest number of blocks that every group knows, as far as it needs them."""
    known = len(names)
    if len(groups) == 1:
        return groups[0].known_prefix(names, known)
    while True:
        before = known
        for group in groups:
            known = group.known_prefix(names, known)
        if known == before:
            return known
