"""The journal of a patch: undo steps, run in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Journal:
    """Undo steps of one patch."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        self.steps.append(step)

    def set_class(self, instance: Any, cls: type) -> None:
        """Set `__class__` of an instance, and note the way back, from this class alone."""
        before: Any = type(instance)
        instance.__class__ = cls

        def back() -> None:
            if type(instance) is cls:  # else changed since, e.g. for a parametrization
                instance.__class__ = before

        self.add(back)

    def undo(self) -> None:
        while self.steps:
            self.steps.pop()()
