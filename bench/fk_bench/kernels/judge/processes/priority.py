"""Real-time priority while batches are timed on a CPU, so that other work of the machine does not interrupt them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

JUDGE, SIDE = 2, 1  # the judge's thread must be able to interrupt a side


@contextlib.contextmanager
def raised(pids: Iterable[int]) -> Iterator[str]:
    """Give the calling thread and the main threads of these processes real-time priority; restore all at the end.

    Their new threads and children keep the usual one. Yields 'on', or 'off: reason' where the user may not do it.
    """
    before: dict[int, tuple[int, os.sched_param]] = {}
    report = "on"
    try:
        for pid, priority in ((0, JUDGE), *((p, SIDE) for p in pids)):
            now = os.sched_getscheduler(pid), os.sched_getparam(pid)
            os.sched_setscheduler(pid, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
            before[pid] = now
    except OSError as error:
        report = f"off: {error.strerror}"
        _restore(before)
        before.clear()
    try:
        yield report
    finally:
        _restore(before)


def _restore(before: dict[int, tuple[int, os.sched_param]]) -> None:
    for pid, (policy, parameter) in reversed(before.items()):
        with contextlib.suppress(OSError):  # it may have ended
            os.sched_setscheduler(pid, policy, parameter)
