"""Whose candidate runs in a call: an op of the process may have one for each model that is patched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from fastkernels.core.dispatch import Provider


class AmbiguousCall(RuntimeError):
    """A call of compiled code may belong to several models with different candidates."""


class _Running(threading.local):
    """The scopes whose code runs in a thread, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []


_running = _Running()
_alive: WeakSet[Scope] = WeakSet()
# Ops with a candidate of one model. While there is none, callers on hot paths do not enter their scope.
ops_with_scopes: set[str] = set()


class Scope:
    """The calls of one model: a context in which its code runs, in this thread.

    name        of the model, for messages
    outside     outside(op) -> whether the model also calls the op where no context is entered, as compiled code does
    candidates  the modules of the files whose functions run in these calls
    """

    def __init__(self, name: str, outside: Callable[[str], bool] = lambda op: False) -> None:
        self.name, self.outside, self.candidates = name, outside, ""
        _alive.add(self)

    def __enter__(self) -> None:
        _running.scopes.append(self)

    def __exit__(self, *error: object) -> None:
        _running.scopes.pop()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a model is not patched


@dataclass(frozen=True, eq=False)
class Installed:
    """A candidate's function in an op.

    file   identifies the candidate: the same file may be that of several models
    scope  the calls that run it; None: all
    """

    provider: Provider
    file: str
    scope: Scope | None


def note(op: str, installed: Sequence[Installed]) -> None:
    """Note the candidates that an op has now."""
    if any(one.scope is not None for one in installed):
        ops_with_scopes.add(op)
    else:
        ops_with_scopes.discard(op)


def of_call(op: str, installed: Sequence[Installed]) -> Installed | None:
    """The candidate for a call in this thread. Raises AmbiguousCall for compiled code that could be of two models."""
    scopes = _running.scopes
    if scopes:
        wanted = scopes[-1]
        return next((one for one in reversed(installed) if one.scope is wanted or one.scope is None), None)
    found = [one for one in installed if one.scope is None or one.scope.outside(op)]
    if not found:
        return None
    last = found[-1]
    if last.scope is None:
        return last
    same = {one.scope for one in found if one.file == last.file}
    others = [scope for scope in list(_alive) if scope not in same and scope.outside(op)]
    if others:
        theirs = next((one.provider.name for one in found if one.scope is others[0]), "no candidate")
        raise AmbiguousCall(
            f"{op}: compiled code of {last.scope.name} runs {last.provider.name}, and that of {others[0].name} runs"
            f" {theirs}: a compiled call does not say which model it is of. Undo one of the two patches, give both the"
            " same file, or use two processes"
        )
    return last
