"""A gate in front of a call: the judge opens it while the side is stopped. On a GPU it holds queued work back."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

from fk_bench.kernels.judge.memory.ipc import driver_call

SIZE = mmap.PAGESIZE
GREATER_OR_EQUAL, DEFAULT = 0, 0  # flags of cuStreamWaitValue32 and cuStreamWriteValue32
PORTABLE_MAPPED = 1 | 2  # flags of cuMemHostRegister


class CallGate:
    """Three words in a page that the judge and one side map: `opened`, `done` and `turned`. Tickets only grow. `turned`
    says whether the judge has turned signs of the call's input, see producer.py.

    The side may write all words. That gains nothing: inputs are made while it is stopped in front of the gate, so what
    ran early is wrong, and the judge also looks at the outputs when the end is reported.
    """

    def __init__(self, fd: int):
        if os.fstat(fd).st_size < SIZE:
            os.ftruncate(fd, SIZE)
        self._page = mmap.mmap(fd, SIZE)
        self._words = (ctypes.c_uint32 * 3).from_buffer(self._page)
        self._ticket = 0
        self._device = 0

    # -- the judge

    def reset(self) -> None:
        """Close the gate for a new process: its predecessor's tickets are in the page."""
        self._words[0] = self._words[1] = self._words[2] = 0

    def ticket(self) -> int:
        """Return the number that closes the gate for the work that is queued next."""
        self._ticket += 1
        return self._ticket

    def turn(self, turned: bool) -> None:
        """Say whether the signs of the next call's input are turned."""
        self._words[2] = turned

    def open(self, ticket: int) -> None:
        """Let the work that waits for this ticket go on, and what was queued before it."""
        self._words[0] = ticket

    def passed(self, ticket: int, seconds: float, nap: float = 0.0) -> bool:
        """Wait until the work behind this ticket reports that it is done; whether it did within so many seconds.

        nap  seconds to sleep between looks, where the side needs this thread's core
        """
        end, words = time.perf_counter() + seconds, self._words
        while words[1] != ticket:
            if time.perf_counter() > end:
                return False
            if nap:
                time.sleep(nap)
        return True

    # -- the side, on a CPU

    def words(self) -> Any:
        """The words: a call may start when [0] has reached its ticket, and then writes the ticket to [1]."""
        return self._words

    # -- the side, on a GPU

    def wait(self, stream: int, ticket: int) -> None:
        """Make the stream wait until the judge has opened the gate. Raises RuntimeError."""
        self._on_stream("cuStreamWaitValue32_v2", stream, 0, ticket, GREATER_OR_EQUAL)

    def report(self, stream: int, ticket: int) -> None:
        """Make the stream report that the work before this is done. Raises RuntimeError."""
        self._on_stream("cuStreamWriteValue32_v2", stream, 4, ticket, DEFAULT)

    @property
    def turned(self) -> int:
        """The GPU's address of the word `turned`. Raises RuntimeError."""
        return self._on_device() + 8

    def _on_device(self) -> int:
        if not self._device:
            address, pointer = ctypes.addressof(self._words), ctypes.c_uint64()
            driver_call(
                "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(SIZE), ctypes.c_uint(PORTABLE_MAPPED)
            )  # fmt: skip
            driver_call(
                "cuMemHostGetDevicePointer_v2",
                ctypes.byref(pointer),
                ctypes.c_void_p(address),
                ctypes.c_uint(0),
            )
            self._device = pointer.value
        return self._device

    def _on_stream(self, function: str, stream: int, offset: int, ticket: int, flags: int) -> None:
        driver_call(
            function, ctypes.c_void_p(stream), ctypes.c_uint64(self._on_device() + offset), ctypes.c_uint32(ticket),
            ctypes.c_uint(flags),
        )  # fmt: skip
