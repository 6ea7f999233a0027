"""The journal of a patch: undo steps, run in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Journal:
    """Undo steps of one patch."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        self.steps.append(step)

    def set_class(self, instance: Any, cls: type) -> None:
        """Set `__class__` of an instance, and note the way back."""
        self.add(partial(setattr, instance, "__class__", type(instance)))
        instance.__class__ = cls

    def undo(self) -> None:
        while self.steps:
            self.steps.pop()()
