"""Subclasses of a host's classes that run our methods."""

from __future__ import annotations

from typing import Any

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core.journal import Journal

_LIVE: dict[tuple[type, type, bool], type] = {}


def live_class(host_class: type, ours: type, by_table: bool = False) -> type:
    """A subclass of the host's class with our methods; its constructor, loaders and isinstance checks stay.

    `ours.live_methods` names the methods, default ("forward",); a candidate may leave the list to the class that it
    replaces.

    by_table: wrap each method in `ours.by_table(theirs, ours)`, which picks one of the two per call by a tuned table.
    """
    key = (host_class, ours, by_table)
    if key not in _LIVE:
        methods = {name: getattr(ours, name) for name in _method_names(host_class, ours)}
        if by_table:
            choose = ours.by_table  # type: ignore[attr-defined]
            methods = {name: choose(getattr(host_class, name), own) for name, own in methods.items()}
        body = {
            **methods,
            "__module__": host_class.__module__,
            "__qualname__": host_class.__qualname__,
            "fastkernels": ours,
        }
        _LIVE[key] = type(host_class.__name__, (host_class,), body)
    return _LIVE[key]


def _method_names(host_class: type, ours: type) -> set[str]:
    forward = {"forward"} if hasattr(ours, "forward") else set()
    if hasattr(ours, "live_methods"):
        return {*ours.live_methods, *forward}
    return forward or set(getattr(host_class, "live_methods", ("forward",)))


def replace_attribute(
    holder: Any, name: str, ours: type, methods: tuple[str, ...], journal: Journal, by_table: bool = False
) -> Reason | None:
    """Replace the object `holder.name` with one of our class and the same state; None, or why not.

    methods: an instance that has one of these as an attribute of its own was patched by other code.
    """
    old = getattr(holder, name)
    if patched := [m for m in methods if m in vars(old)]:
        return Reason(Kind.REPLACED, f"its {name}.{patched[0]} was replaced by other code")
    new: Any = object.__new__(live_class(type(old), ours, by_table))
    vars(new).update(vars(old))
    setattr(holder, name, new)
    journal.add(lambda: setattr(holder, name, old))
    return None
