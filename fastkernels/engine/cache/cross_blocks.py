"""Blocks of the keys and values of cross attention, which belong to a source (an audio) and not to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from fastkernels.engine.cache.blocks import BlockManager


@dataclass(frozen=True)
class Source:
    """The features that an encoder reads, a tensor on the CPU, and the digest of the content."""

    digest: bytes
    values: Any


class CrossBlocks:
    """The blocks of `length` states for each source. Sources that are equal share them, also after their requests."""

    def __init__(self, num_blocks: int, block_size: int, length: int, enable_caching: bool = True):
        self.blocks = BlockManager(num_blocks, block_size, enable_caching)
        self.length = length
        self.each = self.blocks.blocks_for(length)

    def has_room(self, source: Source) -> bool:
        """Whether `hold` is possible."""
        return len(self._known(source)) == self.each or self.each <= self.blocks.num_free

    def hold(self, source: Source, table: list[int]) -> bool:
        """Fill the table of a request with the source's blocks. Returns whether this step must compute them."""
        known = self._known(source)
        if len(known) == self.each:
            self.blocks.hold(known)
            table.extend(known)
            return False
        self.blocks.grow(table, self.length)
        # Named at once: a step computes them before any layer reads, also for other requests
        for block, name in zip(table, self._names(source), strict=True):
            self.blocks.name(block, name)
        return True

    def free(self, table: list[int]) -> None:
        """Give back the blocks of a request's table, and empty it."""
        self.blocks.free(table)

    def _known(self, source: Source) -> list[int]:
        found = self.blocks.find(self._names(source))
        return found if len(found) == self.each else []

    def _names(self, source: Source) -> list[bytes]:
        return [
            blake2b(source.digest + i.to_bytes(4, "little"), digest_size=16).digest()
            for i in range(self.each)
        ]
