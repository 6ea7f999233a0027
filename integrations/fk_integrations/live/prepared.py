"""Values that a candidate's class derives from a loaded module's weights, in its method `prepare(self)`.

Undo removes what `prepare` set on the host's object; copies and pickles of it leave that out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastkernels.core.env import Environment
from fastkernels.core.runtime.trial import within
from fastkernels.overrides.linear.kernels.linear_fp8_scales import holder_of
from fastkernels.patch import PatchError
from fk_integrations.core.journal import ABSENT, Journal
from fk_integrations.live.live_class import PREPARED

_TABLES = ("_parameters", "_buffers", "_modules")  # in which nn.Module keeps its attributes


def prepare(module: Any, ours: type, journal: Journal) -> None:
    """Call `ours.prepare` on the object of our class that a swap has made of a module, or in it.

    Raises PatchError if it fails or takes longer than FASTKERNELS_TRIAL_S.
    """
    method: Any = getattr(ours, "prepare", None)
    if not callable(method):
        return
    for instance in _made_from(module, ours):
        changes = _Changes(instance)
        journal.add(changes.undo)
        what = f"{ours.__name__}.prepare"
        try:
            with within(Environment.read().trial_s, what), torch.no_grad():
                method(instance)
        except Exception as error:
            raise PatchError(f"candidate: {what}() failed: {type(error).__name__}: {error}") from error
        changes.end()


def _made_from(module: Any, ours: type) -> Iterator[Any]:
    """The objects of our class: the module, one that it holds, or the kernel of its method or scheme."""
    holder = holder_of(module)
    found = (module, *vars(module).values(), *(() if holder is None else vars(holder).values()))
    for part in {id(part): part for part in found}.values():
        if getattr(type(part), "fastkernels", None) is ours:
            yield part


class _Changes:
    """Changes of an object's attributes, from now on until `end`."""

    def __init__(self, instance: Any):
        own = vars(instance)
        self.own: dict[str, Any] = own
        self.tables = [own, *(own[name] for name in _TABLES if isinstance(own.get(name), dict))]
        self.before = [dict(table) for table in self.tables]
        self.after: list[dict[str, Any]] | None = None
        self.unsaved: set[str] = own.get("_non_persistent_buffers_set", set())
        self.unsaved_before = set(self.unsaved)

    def end(self) -> None:
        self.after = [dict(table) for table in self.tables]
        pairs = zip(self.before, self.after, strict=True)
        self.own[PREPARED] = frozenset(key for old, new in pairs for key in new.keys() - old.keys())

    def undo(self) -> None:
        """Remove what was added; restore what was replaced, unless other code has replaced it since."""
        self.own.pop(PREPARED, None)
        after = self.after or [dict(table) for table in self.tables]  # the rest of an interrupted call
        for table, old, new in zip(self.tables, self.before, after, strict=True):
            for key in new.keys() - old.keys():
                table.pop(key, None)
                if key not in self.unsaved_before:
                    self.unsaved.discard(key)
            for key, value in old.items():
                if new.get(key, ABSENT) is not value and table.get(key, ABSENT) is new.get(key, ABSENT):
                    table[key] = value
