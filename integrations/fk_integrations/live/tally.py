"""Calls of ops by the modules of one row of a report, so that no other model of the process proves the row.

Eager calls are counted around the methods of the row's modules. Code that torch.compile has made runs no method: a row
gets its share of an op's other calls, in proportion to its modules in compiled code. Counting then costs nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch._dynamo.comptime import comptime

from fastkernels.core import registry
from fastkernels.core.candidate_scopes import Scope, ops_with_scopes
from fastkernels.core.dispatch import OPS, Op, fusions_of, proving
from fk_integrations.core.journal import Journal
from fk_integrations.live.asleep import TALLY as ATTRIBUTE
from fk_integrations.live.decorated import wrapper
from fk_integrations.live.versus import MEASURING

log = logging.getLogger("fastkernels")
_alive: WeakSet[Tally] = WeakSet()
_CALLED = "_fastkernels_called"  # {name of a function that an object's methods call: the tally of its calls}
State = list[tuple[Op, int, int, int, dict[str, int], dict[str, int]]]


def parts_of(module: Any) -> Iterable[Any]:
    """A row's module with all modules inside of it; an object of a host that is none has no others."""
    return module.modules() if isinstance(module, torch.nn.Module) else (module,)


class Tally:
    """The calls in one row's modules since the patch, or since `clear`.

    proving    the ops of which a call proves the row
    ops        these, fusions that run in their place, and those of rows inside
    called     names of these, and of the ops that they call
    modules    the row's modules
    calls      runs of the bodies of `proving` inside these modules; `plain`: of these, in plain PyTorch as a fallback
    direct     {op: runs} inside these modules, and not inside a module of another row
    fallbacks  {reason: calls} of `proving`, and `left` likewise; see Op
    compiled   ids of the modules that torch.compile has traced
    scope      of the patch: its candidates run in these modules
    """

    def __init__(self, op: str, scope: Scope):
        self.op, self.scope = op, scope
        self.ops: list[Op] = []
        self.called: set[str] = set()
        self.proving: set[str] = set()
        self.modules: list[Any] = []
        self.compiled: set[int] = set()
        self.clear()
        _alive.add(self)

    def clear(self) -> None:
        self.calls = self.plain = 0
        self.direct: dict[str, int] = {}
        self.fallbacks: dict[str, int] = {}
        self.left: dict[str, int] = {}

    def add(self, module: Any, holder: Any, journal: Journal) -> None:
        """Count the calls of a module. `holder`, itself or a part of it, has methods that `counted` wraps."""
        self.mark(holder, journal)
        self.modules.append(module)

    def mark(self, holder: Any, journal: Journal) -> None:
        """Have this object, whose methods `counted` wraps, count here."""
        journal.add(lambda: vars(holder).pop(ATTRIBUTE, None))
        vars(holder)[ATTRIBUTE] = self

    def add_function(self, module: Any, name: str, journal: Journal) -> None:
        """Count the calls of a function, which `counted_function` made, in methods of this module."""
        found = vars(module).setdefault(_CALLED, {})
        found[name] = self
        journal.add(lambda: found.pop(name, None) and (found or vars(module).pop(_CALLED)))
        self.modules.append(module)

    def begin(self) -> State:
        return [(op, op.calls, op.owned, op.plain, op.fallbacks, op.left) for op in self.ops]

    def end(self, before: State) -> None:
        if MEASURING:
            return
        for op, calls, owned, plain, fallbacks, left in before:
            runs = op.calls - calls
            if runs > 0:
                inner = op.owned - owned
                op.owned = owned + runs
                if runs > inner:
                    self.direct[op.name] = self.direct.get(op.name, 0) + runs - inner
                if op.name in self.proving:
                    self.calls += runs
                    self.plain += max(op.plain - plain, 0)
            if op.name in self.proving and op.fallbacks is not fallbacks:
                add_new(self.fallbacks, op.fallbacks, fallbacks)
            if op.name in self.proving and op.left is not left:
                add_new(self.left, op.left, left)

    def has(self, other: Tally) -> bool:
        """Whether a module of another row is inside one of these modules, which may compute it."""
        inside = {id(part) for module in self.modules for part in parts_of(module) if part is not module}
        return other is not self and any(id(module) in inside for module in other.modules)


def add_new(to: dict[str, int], now: Mapping[str, int], before: Mapping[str, int]) -> None:
    for reason, calls in now.items():
        if calls > (old := before.get(reason, 0)):
            to[reason] = to.get(reason, 0) + calls - old


def counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that counts what it runs in the object's tally."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # false while an exporter without Dynamo records
            comptime(_note_compiled)
            return method(self, *args, **kwargs)
        tally: Tally | None = vars(self).get(ATTRIBUTE)
        if tally is None:  # undone, and still held by other code
            return method(self, *args, **kwargs)
        before = tally.begin()
        try:
            if not ops_with_scopes:
                return method(self, *args, **kwargs)
            with tally.scope:
                return method(self, *args, **kwargs)
        finally:
            tally.end(before)

    return wrapper(run, method)


class _Calling(threading.local):
    """The objects whose methods are running, the innermost last."""

    def __init__(self) -> None:
        self.objects: list[Any] = []


_running = _Calling()


def calling(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method in which a `counted_function` counts for the object."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            comptime(_note_compiled)
            return method(self, *args, **kwargs)
        _running.objects.append(self)
        try:
            return method(self, *args, **kwargs)
        finally:
            _running.objects.pop()

    return wrapper(run, method)


@cache
def counted_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that counts what it runs in the tally that the calling object has for it."""
    name = getattr(function, "__name__", "")

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not _running.objects:
            return function(*args, **kwargs)
        tally: Tally | None = vars(_running.objects[-1]).get(_CALLED, {}).get(name)
        if tally is None:
            return function(*args, **kwargs)
        before = tally.begin()
        try:
            if not ops_with_scopes:
                return function(*args, **kwargs)
            with tally.scope:
                return function(*args, **kwargs)
        finally:
            tally.end(before)

    return wrapper(run, function)


def _note_compiled(context: Any) -> None:
    """Note that torch.compile traces a module; runs while it does."""
    if MEASURING:
        return
    try:
        module = context.get_local("self")._ComptimeVar__variable.realize().value
    except (AttributeError, KeyError) as error:  # of another PyTorch: its calls are then not in a row's
        log.debug("a compiled module is not counted: %s", error)
        return
    own: Tally | None = vars(module).get(ATTRIBUTE)
    for tally in (own, *vars(module).get(_CALLED, {}).values()):
        if tally is not None:
            tally.compiled.add(id(module))


def compiled_calls(op: Op, tally: Tally | None, tallies: Iterable[Tally], before: int) -> int:
    """The part of an op's calls outside of all tallies, since there were `before`, that belongs to a row.

    tallies  of the rows whose modules may compute those of this row
    """
    calls = op.unowned - before
    prove = [t for t in _alive if t.compiled and op.name in t.proving]
    if tally is not None and tally in prove:
        return round(calls * len(tally.compiled) / sum(len(t.compiled) for t in prove))
    inside = any(t.compiled and op in t.ops for t in tallies)
    return calls if inside and not prove else 0


class Counts:
    """The tallies of one patch, by the id of their row."""

    def __init__(self) -> None:
        self.of: dict[int, Tally] = {}
        self.before: dict[str, int] = {}

    def watch(self) -> None:
        """Count in each row's modules also the ops of the rows inside: a block may compute its norms itself."""
        for tally in self.of.values():
            tally.proving = {op.name for op in proving(tally.op)}
            tally.ops = [*proving(tally.op), *fusions_of(tally.op)]
        own = {id(tally): list(tally.ops) for tally in self.of.values()}
        for tally in self.of.values():
            for other in self.of.values():
                if tally.has(other):
                    tally.ops += [op for op in own[id(other)] if op not in tally.ops]
            tally.called = {op.name for op in tally.ops} | registry.reached(tally.op)

    def compiled(self, op: str) -> bool:
        """Whether code that torch.compile has made of the patch's modules may call the op."""
        return any(tally.compiled and op in tally.called for tally in self.of.values())

    def clear(self) -> None:
        self.before = {name: op.unowned for name, op in OPS.items()}
        for tally in self.of.values():
            tally.clear()

    def calls(self, row: Any, ops: Iterable[Op]) -> int:
        """Runs of these ops in the row's modules, in modules that compute these, and in compiled code."""
        tally = self.of.get(id(row))
        around = [t for t in self.of.values() if tally is None or t.has(tally)]
        total = tally.calls if tally is not None and {op.name for op in ops} == tally.proving else 0
        for op in ops:
            total += sum(t.direct.get(op.name, 0) for t in around)
            if tally is not None and op.name not in tally.proving:  # a fusion
                total += tally.direct.get(op.name, 0)
            total += compiled_calls(op, tally, around, self.before.get(op.name, 0))
        return total

    def plain(self, row: Any, ops: Iterable[Op]) -> int:
        """Those of a row's calls that fell back to plain PyTorch; with calls in compiled code, those of the process."""
        tally = self.of.get(id(row))
        if tally is not None and row.calls == tally.calls:
            return tally.plain
        return sum(op.plain for op in ops)

    def reasons(self, row: Any, kind: str, ops: Iterable[Op]) -> dict[str, int]:
        """{reason: calls} of a row's ops; kind: 'fallbacks' or 'left'."""
        tally = self.of.get(id(row))
        around = [t for t in self.of.values() if tally is None or t.has(tally)]
        found: dict[str, int] = {} if tally is None else dict(getattr(tally, kind))
        names = {op.name for op in ops}
        for other in around:
            if names & other.proving:
                for reason, calls in getattr(other, kind).items():
                    found[reason] = max(found.get(reason, 0), calls)
        if tally is None or tally.compiled or any(t.compiled for t in around):
            for op in ops:
                for reason, calls in getattr(op, kind).items():  # noted while a module was traced
                    known = sum(getattr(t, kind).get(reason, 0) for t in _alive if op.name in t.proving)
                    if calls > known:
                        found[reason] = found.get(reason, 0) + calls - known
        return found
