"""Processes of an item that start while others work, so that a host's minutes of start-up pass only once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
            return lambda: _loaded(self._spawned(spawn), load)
        side = self._spawned(spawn)  # in this thread; only the slow part has one of its own
        return self._pool.submit(_loaded, side, load).result

    def _spawned(self, spawn: Callable[[], Side]) -> Side:
        self._sides.append(spawn())
        return self._sides[-1]

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


def _loaded(side: Side, load: Callable[[Side], object]) -> Side:
    load(side)
    return side
