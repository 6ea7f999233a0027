"""The memory that the judge shares with one side: an allocation of its own, with the slots at random places."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from typing import Any

import torch

from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.memory import ipc, layout
from fk_bench.kernels.judge.memory.slots import Slots, poison

SPARE = 4  # one empty place for so many slots, so that distances between slots differ


def memory_file() -> int:
    """A memfd that can only grow: shrinking it would end the judge with SIGBUS."""
    fd = os.memfd_create("fk-judge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


class Arena:
    """The slots of a case as one side sees them; `publish` copies values from the judge's private slots.

    fd      the memfd that this side has (CPU); on a GPU each arena is memory of its own, of the current device
    fds     GPU: the file descriptor that the side maps it by
    theirs  GPU: a trusted side allocates it, and `attach` maps it here. Hosts' collectives exchange addresses of
            inputs, which the driver allows for memory of their own process only
    """

    @PHASES.of("memory")
    def __init__(self, slots: Slots, out_slots: int, fd: int, theirs: bool = False):
        self.slots, self.out_slots = slots, out_slots
        self.device = torch.device(slots.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        places = slots.count + slots.count // SPARE + 1
        self.cells = secrets.SystemRandom().sample(range(places), slots.count)
        self._free = next(iter(set(range(places)) - set(self.cells)))
        self.out_start = slots.layout.arena_bytes(places)
        total = max(self.out_start + out_slots * slots.out_bytes, layout.ALIGN)
        self._allocation: ipc.Memory | None = None
        self._mapping = ipc.Mapping() if theirs else None
        self.place = {"nbytes": total, "cells": places, "outputs": self.out_start, "out_slots": out_slots}
        self._places, self._bound = places, dict[int, list[Any]]()
        self._read_only = slots.read_only()
        if theirs:
            self.place["theirs"] = True
        elif slots.device == "cuda":
            self._allocation = ipc.Memory(total)
            self._use(self._allocation.bytes)
        else:
            if os.fstat(fd).st_size < total:  # it only grows, because the process may have mapped it
                os.ftruncate(fd, total)
            self._use(torch.frombuffer(mmap.mmap(fd, total), dtype=torch.uint8))
        self.fds = () if self._allocation is None else (self._allocation.fd,)

    def _use(self, memory: torch.Tensor) -> None:
        self.bytes, stride = memory, self.slots.layout.stride
        self._grid = memory[: self._places * stride].view(self._places, stride)
        # Indexing copies word by word; a slot without bytes of its own (all arguments are shared) has no words.
        self._words = self._grid.view(torch.int64) if stride else None
        self._index = torch.tensor(self.cells, device=memory.device)

    def attach(self, handle: str, offset: int) -> None:
        """Use this allocation of the side. Raises RuntimeError if it cannot be mapped."""
        assert self._mapping is not None
        self._use(
            self._mapping.bytes_at({"handle": handle, "offset": offset, "nbytes": self.place["nbytes"]})
        )

    def publish(self, start: int = 0, count: int | None = None) -> None:
        """Copy the values of `count` slots from `start` (None: to the last), and those that all slots share, from the
        judge's private memory.
        """
        if not self.slots.layout.stride and not self.slots.layout.shared:
            return
        part = slice(start, None if count is None else start + count)
        if self._words is None:
            pass
        elif count == 1:
            self._grid[self.cells[start]].copy_(self.slots.grid[start])
        else:
            self._words[self._index[part]] = self.slots.grid[part].view(torch.int64)
        if shared := self.slots.layout.shared:
            at = self._places * self.slots.layout.stride
            self.bytes[at:][:shared].copy_(self.slots.private[-shared:])
        self._wait()

    def row(self, slot: int) -> torch.Tensor:
        """The bytes of a slot's arguments in this memory."""
        return self._grid[self.cells[slot]]

    @property
    def spare(self) -> torch.Tensor:
        """As many bytes that no slot uses."""
        return self._grid[self._free]

    def args_of(self, slot: int) -> list[Any]:
        """A slot's arguments in this memory."""
        if slot not in self._bound:
            self._bound[slot] = layout.bind(self.slots.plan, self.bytes, self.cells[slot], self._places)
        return self._bound[slot]

    def output_views(self, slot: int) -> list[torch.Tensor]:
        """The views of an output slot."""
        at, views = self.out_start + slot * self.slots.out_bytes, []
        for o in self.slots.outs:
            views.append(self.bytes[at:][: o.bytes].view(o.dtype).view(o.shape))
            at += o.nbytes
        return views

    def poison(self) -> None:
        """Fill the output slots with NaN (floats) or a secret byte (integers)."""
        for s in range(self.out_slots):
            poison(self.output_views(s))
        self._wait()

    def _wait(self) -> None:
        """A command may follow at once, and its process does not wait for the judge's stream."""
        if self.slots.device == "cuda":
            torch.cuda.synchronize()

    def changed(self, slot: int | None = None) -> bool:
        """Whether an argument that the op does not write differs from what was published, in any slot or in one."""
        for offset, size in self._read_only:
            part = slice(offset, offset + size)
            if slot is not None:
                here, private = self._grid[self.cells[slot], part], self.slots.grid[slot, part]
            else:
                here, private = self._rows(self._grid, part)[self._index], self._rows(self.slots.grid, part)
            if not torch.equal(here, private):
                return True
        start, size = self._places * self.slots.layout.stride, self.slots.layout.shared
        return bool(size) and not torch.equal(self.bytes[start:][:size], self.slots.private[-size:])

    @staticmethod
    def _rows(grid: torch.Tensor, part: slice) -> torch.Tensor:
        rows = grid[:, part]
        return rows if (part.stop - part.start) % 8 else rows.view(torch.int64)

    @PHASES.of("memory")
    def close(self) -> None:
        """Free it. No tensor of this memory may be used afterwards."""
        self._bound.clear()
        if self._allocation is not None:
            self._allocation.close()
        if self._mapping is not None:
            self._mapping.close()
