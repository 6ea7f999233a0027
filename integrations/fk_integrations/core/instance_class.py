"""The class of a live object, together with the methods of it that its host has bound to it.

ultralytics' `fuse()` sets `module.forward = module.forward_fuse`, and removed hooks of accelerate leave a bound
`forward` behind: an attribute of the object, which a change of its class alone would not reach.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

_CLASS: Any = vars(object)["__class__"]


def is_bound_method(instance: Any, value: Any) -> bool:
    """Whether this value is a method of the object's class, bound to the object."""
    return _is_method_of(type(instance), value) and value.__self__ is instance


def _is_method_of(cls: type, value: Any) -> bool:
    return isinstance(value, MethodType) and getattr(cls, value.__func__.__name__, None) is value.__func__


def change_class(instance: Any, cls: type) -> None:
    """Set `__class__` of an object, and bind the methods of the new class where those of the old one were bound."""
    before = type(instance)
    _CLASS.__set__(instance, cls)
    bind_methods(instance, before, cls)


def bind_methods(instance: Any, old: type, new: type) -> None:
    """Replace bound methods `forward...` of `old` among the object's own attributes by those of `new`."""
    for name, value in list(getattr(instance, "__dict__", {}).items()):
        if name.startswith("forward") and _is_method_of(old, value):
            vars(instance)[name] = MethodType(getattr(new, value.__func__.__name__), value.__self__)
