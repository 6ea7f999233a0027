"""Progress of a long run on standard error: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

_EVERY_S = 30.0  # between two plain lines with the time left


class TimeLeft:
    """The time left of a run whose steps are of several kinds, from estimates and then from the steps that are done.

    plan  {kind: (number of steps, estimated seconds of all of them)}; 0 seconds if there is no estimate
    """

    def __init__(self, plan: Mapping[str, tuple[int, float]], clock: Callable[[], float] = time.monotonic):
        self.steps = {kind: steps for kind, (steps, _) in plan.items()}
        self.estimated = {kind: seconds / max(1, steps) for kind, (steps, seconds) in plan.items()}
        self.done = dict.fromkeys(plan, 0)
        self.spent = dict.fromkeys(plan, 0.0)
        self._clock, self._last = clock, clock()

    def advance(self, kind: str) -> None:
        """A step has ended: the time since the last one is its duration."""
        now = self._clock()
        self.done[kind] += 1
        self.spent[kind] += now - self._last
        self._last = now

    def seconds(self) -> float | None:
        """None before the first step if a kind has no estimate."""
        expected = sum(self.done[k] * self.estimated[k] for k in self.done)
        pace = sum(self.spent.values()) / expected if expected else 1.0
        left = 0.0
        for kind, steps in self.steps.items():
            open_steps = max(0, steps - self.done[kind])
            each = self.spent[kind] / self.done[kind] if self.done[kind] else pace * self.estimated[kind]
            if open_steps and not each:
                return None
            left += open_steps * each
        return max(0.0, left - (self._clock() - self._last))


class Display:
    """A progress bar with lines above it; a context manager. `plan` is that of TimeLeft, or a number of steps."""

    def __init__(self, console: Console, plan: int | Mapping[str, tuple[int, float]]):
        self.console = console
        self.left = TimeLeft({"": (plan, 0.0)} if isinstance(plan, int) else plan)
        self._said = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _Left(self.left),
            console=console, disable=not console.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=sum(self.left.steps.values()))

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._bar.stop()

    def doing(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def advance(self, kind: str = "") -> None:
        """One step of this kind is done. Without a terminal, a line tells the time left now and then."""
        self.left.advance(kind)
        self._bar.advance(self._task)
        now = time.monotonic()
        seconds = self.left.seconds()
        if not self.console.is_terminal and seconds and now - self._said > _EVERY_S:
            self._said = now
            done, steps = sum(self.left.done.values()), sum(self.left.steps.values())
            self.line(f"{done} of {steps} steps done, about {minutes(seconds)} left")

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Left(ProgressColumn):
    """The time left, in words."""

    def __init__(self, left: TimeLeft):
        super().__init__()
        self.left = left

    def render(self, task: Task) -> Text:
        seconds = self.left.seconds()
        return Text("" if seconds is None else f"about {minutes(seconds)} left", style="progress.remaining")


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} minutes"
