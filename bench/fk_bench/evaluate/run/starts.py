"""Processes of an item that start while others work, so that a host's minutes of start-up pass only once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType

from fk_bench.evaluate.run.side import Side


class Starts:
    """A context manager that ends what was not taken. together: False starts each process when it is taken."""

    def __init__(self, together: bool, most: int = 4):
        self._sides: list[Side] = []
        self._pool = ThreadPoolExecutor(most) if together else None

    def plan(self, spawn: Callable[[], Side], load: Callable[[Side], object]) -> Callable[[], Side]:
        """A function that returns the loaded process, and raises SideFailed if it did not start."""
        if self._pool is None:
            return partial(self._start, spawn, load)
        side = spawn()  # here, because one process starts all; only the slow part has a thread of its own
        return self._pool.submit(self._load, side, load).result

    def _start(self, spawn: Callable[[], Side], load: Callable[[Side], object]) -> Side:
        return self._load(spawn(), load)

    def _load(self, side: Side, load: Callable[[Side], object]) -> Side:
        self._sides.append(side)
        load(side)
        return side

    def __enter__(self) -> Starts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            for side in self._sides:
                side.child.kill()  # a thread that waits for its answer sees its end
            self._pool.shutdown(cancel_futures=True)
        for side in self._sides:
            side.close()
