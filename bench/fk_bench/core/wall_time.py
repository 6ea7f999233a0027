"""Where the wall time of a case goes: seconds by phase, such as making inputs, the oracle, or waiting for a command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

OTHER = "other"


class Phases:
    """Seconds by phase since the last `take`. A phase inside another one counts only for itself.

    around: a context manager for each phase, made from its name
    """

    def __init__(self) -> None:
        self.around: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()
        self._seconds: dict[str, float] = {}
        self._open = [OTHER]
        self._since = time.perf_counter()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the time of the block (or of the function that this decorates) as phase `name`."""
        self._turn()
        self._open.append(name)
        try:
            with self.around(name):
                yield
        finally:
            self._turn()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """The seconds since the last call, longest first; together they are the wall time."""
        self._turn()
        found, self._seconds = self._seconds, {}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _turn(self) -> None:
        now = time.perf_counter()
        name = self._open[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


# One a process, because one judge runs at a time; its reader takes the seconds after each case.
PHASES = Phases()
