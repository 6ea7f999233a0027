"""The journal of a patch: undo steps, run in reverse order.

A step is added before its change is made, leaves a change that was not made alone, and may run twice. An interruption
between any two instructions, such as Ctrl-C, then loses no step: a later `undo` continues where this one ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fk_integrations.core.instance_class import change_class

log = logging.getLogger("fastkernels")
ABSENT = object()


class Journal:
    """Undo steps of one patch."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        """Note the way back of a change that follows."""
        self.steps.append(step)

    def set_class(self, instance: Any, cls: type) -> None:
        """Set `__class__` of an instance; the way back starts from this class alone."""
        before: Any = type(instance)

        def back() -> None:
            if type(instance) is cls:  # else changed since, e.g. for a parametrization
                change_class(instance, before)

        self.add(back)
        change_class(instance, cls)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; the way back starts from this value alone."""
        before = vars(owner).get(name, ABSENT)

        def back() -> None:
            if vars(owner).get(name, ABSENT) is not value:
                return
            if before is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self.add(back)
        setattr(owner, name, value)

    def undo(self) -> None:
        """Run all steps. One that fails does not keep the others from running; the first error is raised at the end."""
        first: Exception | None = None
        while self.steps:
            try:
                self.steps[-1]()
            except Exception as error:
                log.exception("fastkernels: a step of an undo failed")
                first = first or error
            self.steps.pop()
        if first is not None:
            raise first
