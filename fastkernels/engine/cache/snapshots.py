"""Snapshots of recurrent states: the prefix cache of layers that keep a state instead of the keys of all tokens.

A running sequence has one slot of state, which every step overwrites. A snapshot is a copy of it at the border of a
block, in a slot of its own. It is named by the hash of the tokens before the border, like the block that ends there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

SEEN = 1 << 16  # names of borders to remember: 2^20 tokens in blocks of 16
INTERVAL = 256  # tokens; a copy every 256 decodes adds 0.4% to the bytes that these move


class Snapshots:
    """Allocates slots first .. first + count - 1 to snapshots; the least recently used one is evicted.

    block_size  tokens between borders
    interval    least number of tokens between two snapshots of a sequence, except where prefixes branch
    epoch       number of resets; see BlockManager

    A snapshot costs a copy and, in a prompt, often a step more. So they are made where a prompt's chunk ends, in
    intervals of the generated tokens, and at a branch: the last border that a new sequence shares with an earlier one.
    """

    def __init__(
        self, count: int, first: int, block_size: int, enable_caching: bool = True, interval: int = INTERVAL
    ):
        self.count, self.block_size, self.interval = count, block_size, interval
        self.enable_caching = enable_caching and count > 0
        self.epoch = 0
        self._free = list(range(first + count - 1, first - 1, -1))
        self._slot: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._found: set[bytes] = set()  # those that a sequence has started from
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Snapshots with a name."""
        return len(self._slot)

    @property
    def num_free(self) -> int:
        """Slots that `take` can return, including those of snapshots."""
        return len(self._free) + len(self._slot)

    def known_prefix(self, names: Sequence[bytes], limit: int) -> int:
        """The largest number of blocks, up to `limit`, that a snapshot follows."""
        return next((i for i in range(limit, 0, -1) if names[i - 1] in self._slot), 0)

    def num_seen(self, names: Sequence[bytes]) -> int:
        """The number of first blocks that an earlier sequence had, too."""
        return next((i for i, name in enumerate(names) if name not in self._seen), len(names))

    def see(self, name: bytes) -> None:
        """Remember that a sequence has computed the tokens of this name."""
        if self.enable_caching:
            self._seen[name] = None
            self._seen.move_to_end(name)
            if len(self._seen) > SEEN:
                self._seen.popitem(last=False)

    def find(self, name: bytes) -> int:
        """The slot of a known snapshot, to copy from in the next step."""
        self._slot.move_to_end(name)
        self._found.add(name)
        return self._slot[name]

    def take(self) -> int | None:
        """A slot for a new snapshot; None if all have been taken and not named yet."""
        if self._free:
            return self._free.pop()
        if not self._slot:
            return None
        name, slot = self._slot.popitem(last=False)
        self._found.discard(name)
        return slot

    def name(self, slot: int, name: bytes) -> bool:
        """Name the snapshot in a taken slot. Gives the slot back, and returns False, if there is one of this name."""
        if name in self._slot:
            self.give_back(slot)
            return False
        self._slot[name] = slot
        return True

    def give_back(self, slot: int) -> None:
        """Free a slot that has been taken and not named."""
        self._free.append(slot)

    def drop(self, name: bytes) -> None:
        """Forget the snapshot of this name, if there is one, e.g. because its block is evicted."""
        slot = self._slot.pop(name, None)
        if slot is not None:
            self._found.discard(name)
            self._free.append(slot)

    def drop_unused(self, name: bytes) -> None:
        """Forget the snapshot of this name unless a sequence has started from it."""
        if name not in self._found:
            self.drop(name)

    def reset_cache(self) -> None:
        """Forget all names."""
        self.epoch += 1
        self._free.extend(self._slot.values())
        self._slot.clear()
        self._found.clear()
        self._seen.clear()
