"""The features of media that the ranks keep: which are there, which a step computes, and which make room for them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MediaItem:
    """A medium in a prompt, or a part of one, as the model's encoder takes it.

    kind    'image', 'video' (some steps of one) or 'audio'
    digest  of its content: equal media have the same features
    values  its patches [P, C * t * p * p], a tensor on the CPU in the model's dtype; grid: (steps, rows, columns). Of
            audio, the frames [bins, F] of its spectrum; grid: (F, 1, 1)
    start   its first token; size: the number of its tokens, which is that of its features
    """

    kind: str
    digest: bytes
    values: Any
    grid: tuple[int, int, int]
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class MediaCache:
    """Media by digest, with the number of holders. Those without one stay until others need their room.

    capacity    features that the ranks keep
    most        features that a step computes; a larger medium is computed in a step of its own
    encodes     media that the step being scheduled computes; dropped: digests whose features no rank needs any more
    """

    def __init__(self, capacity: int, most: int):
        self.capacity, self.most = capacity, most
        self.encodes: list[MediaItem] = []
        self.dropped: list[bytes] = []
        self.used = 0  # features
        self.queries = self.hits = 0
        self._sizes: dict[bytes, int] = {}
        self._holders: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # without a holder, the oldest first

    def hold(self, item: MediaItem) -> bool:
        """Hold a medium, which this step computes unless it is there. False: there is no room for it in this step."""
        known = item.digest in self._sizes
        if not known and not self._make_room(item.size):
            return False
        self.queries += 1
        if known:
            self.hits += 1
            self._idle.pop(item.digest, None)
        else:
            self._sizes[item.digest] = item.size
            self.used += item.size
            self.encodes.append(item)
        self._holders[item.digest] = self._holders.get(item.digest, 0) + 1
        return True

    def release(self, item: MediaItem) -> None:
        """Give back what `hold` held."""
        left = self._holders[item.digest] - 1
        if left:
            self._holders[item.digest] = left
        else:
            del self._holders[item.digest]
            self._idle[item.digest] = None

    def take(self) -> tuple[list[MediaItem], list[bytes]]:
        """(media to compute, digests to drop) of the step that has been scheduled."""
        made, self.encodes, self.dropped = (self.encodes, self.dropped), [], []
        return made

    def forget(self) -> None:
        """Drop the media without a holder: the model's code may have changed, or a step may have failed."""
        while self._idle:
            self._drop_oldest()

    def _make_room(self, size: int) -> bool:
        computed = sum(item.size for item in self.encodes)
        if self.encodes and computed + size > self.most:
            return False
        idle = sum(self._sizes[digest] for digest in self._idle)
        if self.used - idle + size > self.capacity:
            return False
        while self.used + size > self.capacity:
            self._drop_oldest()
        return True

    def _drop_oldest(self) -> None:
        digest, _ = self._idle.popitem(last=False)
        self.used -= self._sizes.pop(digest)
        self.dropped.append(digest)
        self.encodes = [item for item in self.encodes if item.digest != digest]
