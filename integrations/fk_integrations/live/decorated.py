"""Functions of a host under the host's own decorators, such as one that renames a deprecated argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from types import CellType, FunctionType
from typing import Any


def host_function(method: Any) -> Any:
    """The function that a decorated method runs in the end, if only code of its own package decorates it.

    A method that other code has wrapped is returned as it is: that code may compute something else.
    """
    inner = method
    while isinstance(inner, FunctionType) and hasattr(inner, "__wrapped__"):
        if _cell_of(inner, inner.__wrapped__) is None:
            return method
        inner = inner.__wrapped__
    chain = method
    while chain is not inner:
        if _package(chain) != _package(inner):
            return method
        chain = chain.__wrapped__
    return inner


def redecorated(method: Any, new: Any) -> Any:
    """`method` with its decorators around `new` in the place of its `host_function`."""
    if method is host_function(method):
        return new
    inner = redecorated(method.__wrapped__, new)
    at, cells = _cell_of(method, method.__wrapped__), list(method.__closure__)
    cells[at] = CellType(inner)  # type: ignore[index]
    made = FunctionType(
        method.__code__, method.__globals__, method.__name__, method.__defaults__, tuple(cells)
    )
    made.__kwdefaults__ = method.__kwdefaults__
    made.__dict__.update({**vars(method), "__wrapped__": inner})
    made.__qualname__, made.__module__, made.__doc__ = method.__qualname__, method.__module__, method.__doc__
    return made


def plain_function(value: Any) -> FunctionType | None:
    """The function that a global name of a host's file stands for; None if it is no function.

    With the package `kernels` installed, transformers makes modules of functions that the hub may replace.
    """
    if isinstance(value, FunctionType):
        return value
    forward = getattr(type(value), "forward", None)
    if not isinstance(forward, FunctionType) or forward.__module__.partition(".")[0] != "kernels":
        return None
    found = inspect.getclosurevars(forward).nonlocals.values()
    functions = [f for f in found if isinstance(f, FunctionType)]
    return functions[0] if len(functions) == 1 and "forward" not in vars(value) else None


def _package(function: FunctionType) -> str:
    """The package whose code a function is: functools.wraps changes its __module__."""
    return str(function.__globals__.get("__name__", "")).partition(".")[0]


def _cell_of(function: FunctionType, held: Any) -> int | None:
    """The index of the closure's cell that holds this object."""
    cells = function.__closure__ or ()
    return next((i for i, cell in enumerate(cells) if _contents(cell) is held), None)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return None


def wrapper(run: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.update_wrapper` for code that torch.compile traces.

    diffusers reads the signature of a processor's __call__ in forward. torch 2.13 then guards on the defaults of `run`,
    with the length of those of `inner`. A function of *args and **kwargs does not use its own.
    torch.compile limits the recompilations of a code object, so each function gets one that no other has.
    """
    run.__code__ = run.__code__.replace()
    run.__defaults__ = getattr(inner, "__defaults__", None)
    return update_wrapper(run, inner)
