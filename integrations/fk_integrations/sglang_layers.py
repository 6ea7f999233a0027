"""SGLang's method objects: what is replaced inside a layer that stays the host's."""

from __future__ import annotations

from typing import Any

from .apply import Journal, live_class


def swap_quant_method(module: Any, ours: type, journal: Journal) -> str | None:
    """Give a linear-like module a method object of our class, with the state of its own. None, or why not."""
    old = module.quant_method
    if "apply" in vars(old):
        return "the method object's apply was replaced by somebody else"
    method: Any = object.__new__(live_class(type(old), ours))
    vars(method).update(vars(old))
    module.quant_method = method
    journal.add(lambda: setattr(module, "quant_method", old))
    return None
