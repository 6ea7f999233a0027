"""The calls of each row of a patch in an engine: those in the engine's own steps, shared out among the rows of an op.

A call costs nothing if no other row has its op, and a step a few microseconds. Of several rows with one op, calls of
modules outside of compiled code are counted one by one; if nothing is compiled, those of the largest row are not. The
other calls of the op belong to the remaining rows, in proportion to their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from operator import attrgetter
from types import FunctionType
from typing import Any

from fastkernels.core.candidate_scopes import Scope, ops_with_scopes
from fastkernels.core.counters import Counters
from fastkernels.core.dispatch import Op, begin_direct_calls, end_direct_calls, fusions_of, proving
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.journal import Journal
from fk_integrations.live.live_class import is_ours, parts
from fk_integrations.live.tally import Counts, Tally, add_new, counted, parts_of

_counts = attrgetter("calls", "fallbacks", "left", "owned", "plain")


class EngineCounts(Counts):
    """The counts of one patch.

    steps  {op: what it counted in `running`}; None: all calls of the process are this engine's
    alone  ids of the tallies of rows whose calls are counted module by module
    scope  of the patch: its candidates run in the engine's steps
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope
        self.steps: dict[str, Counters] | None = None
        self.alone: set[int] = set()
        self._ops: list[Op] = []
        self._running = False

    def watch_rows(self, ops: Iterable[str], adapter: Adapter, model: Any, journal: Journal) -> None:
        """Count the ops of these rows, module by module if several rows have an op."""
        self.watch()
        self._ops = list({op.name: op for name in ops for op in (*proving(name), *fusions_of(name))}.values())
        compiled = {id(module) for module in adapter.compiled(model)}
        for name in dict.fromkeys(name for tally in self.of.values() for name in tally.proving):
            several = self._sharing(name)
            eager = [t for t in several if compiled.isdisjoint(map(id, t.modules))]
            if len(eager) == len(several):
                eager.remove(max(eager, key=lambda t: len(t.modules)))
            for tally in eager:
                if id(tally) not in self.alone and _count_modules(tally, adapter, journal):
                    self.alone.add(id(tally))

    def watch_op(self, name: str) -> None:
        """Count an op that a compiler pass calls: no module of a row does."""
        self._ops += [op for op in proving(name) if op not in self._ops]

    def _sharing(self, op: str) -> list[Tally]:
        return [tally for tally in self.of.values() if op in tally.proving]

    def only_steps(self) -> None:
        """From now on, count only what is `running`: the process may have more than one engine."""
        self.steps = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the calls in this block as the engine's."""
        if self._running or self.steps is None:
            yield
            return
        ops = self._ops
        before = [*map(_counts, ops)]
        self._running = True
        try:
            with self.scope:
                yield
        finally:
            self._end(ops, before)

    def during(self, method: Callable[..., Any], eager: bool = False) -> Callable[..., Any]:
        """A method whose calls are `running`, without the cost of a context: small models wait for this code.

        eager: nothing is compiled, and calls of ops need no dispatcher of torch
        """

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._running or self.steps is None:
                return method(*args, **kwargs)
            ops = self._ops
            before = [*map(_counts, ops)]
            self._running = True
            direct = eager and begin_direct_calls()
            try:
                if not ops_with_scopes:
                    return method(*args, **kwargs)
                with self.scope:
                    return method(*args, **kwargs)
            finally:
                if direct:
                    end_direct_calls()
                self._end(ops, before)

        return run

    def _end(self, ops: list[Op], before: list[Any]) -> None:
        """Add what ops counted since `before`: nothing in a step that replays a graph."""
        self._running = False
        assert self.steps is not None
        if [*map(_counts, ops)] == before:
            return
        for op, (calls, fallbacks, left, owned, plain) in zip(ops, before, strict=True):
            if op.calls == calls and op.fallbacks is fallbacks and op.left is left:
                continue
            found = self.steps.get(op.name)
            if found is None:
                found = self.steps[op.name] = Counters(op.name)
            runs = max(op.calls - calls, 0)
            op.owned = owned + runs
            found.calls += runs
            found.plain += max(op.plain - plain, 0)
            if op.fallbacks is not fallbacks:
                add_new(found.fallbacks, op.fallbacks, fallbacks)
            if op.left is not left:
                add_new(found.left, op.left, left)

    def clear(self) -> None:
        super().clear()
        if self.steps is not None:
            self.steps = {}

    def _of_engine(self, op: Op) -> Counters:
        return op if self.steps is None else self.steps.get(op.name, Counters(op.name))

    def calls(self, row: Any, ops: Iterable[Op]) -> int:
        """The row's part of the runs of these ops."""
        tally, total = self.of.get(id(row)), 0
        for op in ops:
            runs = self._of_engine(op).calls
            if tally is None or op.name not in tally.proving:  # a fusion, or a function without a module
                total += runs
                continue
            mine, others, weight = self._split(tally, op.name)
            own, other = (sum(t.direct.get(op.name, 0) for t in tallies) for tallies in (mine, others))
            total += own + round((runs - own - other) * weight)
        return total

    def plain(self, row: Any, ops: Iterable[Op]) -> int:
        """Those of a row's calls that fell back to plain PyTorch."""
        ops = list(ops)
        total = sum(self._of_engine(op).plain for op in ops)
        if (tally := self.of.get(id(row))) is None or id(tally) not in self.alone:
            return total
        return tally.plain

    def reasons(self, row: Any, kind: str, ops: Iterable[Op]) -> dict[str, int]:
        """{reason: calls} of a row's ops; kind: 'fallbacks' or 'left'."""
        ops = list(ops)
        found = {why: n for op in ops for why, n in getattr(self._of_engine(op), kind).items()}
        if (tally := self.of.get(id(row))) is None:
            return found
        if id(tally) in self.alone:
            return dict(getattr(tally, kind))
        for other in {id(t): t for op in ops for t in self._sharing(op.name) if id(t) in self.alone}.values():
            for why, n in getattr(other, kind).items():
                found[why] = found.get(why, 0) - n
        return {why: n for why, n in found.items() if n > 0}

    def _split(self, tally: Tally, op: str) -> tuple[list[Tally], list[Tally], float]:
        """Tallies with calls of their own, the row's and others', and the row's part of the remaining calls.

        A module that replaces several may compute their op, as a layer does for its norms: its calls are theirs, too.
        Where both have the same op, they are the outer one's alone.
        """
        rows = self._sharing(op)
        mine = {id(t) for t in rows if t is tally or (t.op != tally.op and t.has(tally))}
        alone = [t for t in rows if id(t) in self.alone]
        modules = {id(t): _outermost(t, rows) for t in rows if id(t) not in self.alone}
        part = sum(n for key, n in modules.items() if key in mine) / (sum(modules.values()) or 1)
        return [t for t in alone if id(t) in mine], [t for t in alone if id(t) not in mine], part


def _outermost(tally: Tally, rows: list[Tally]) -> int:
    """The modules of a row that are not inside of a module of another row with the same op."""
    others = [m for t in rows if t is not tally and t.op == tally.op for m in t.modules]
    inside = {id(part) for module in others for part in parts_of(module) if part is not module}
    return sum(id(module) not in inside for module in tally.modules)


def _count_modules(tally: Tally, adapter: Adapter, journal: Journal) -> bool:
    """Count the calls of each module of a row; False if the object that runs our code is not found in each."""
    holders = []
    for module in tally.modules:
        found = [part for part in (module, *parts(module, depth=3)) if is_ours(type(part))]
        if not found:
            return False
        holders.append((module, found[0]))
    for module, holder in holders:
        kind: Any = type(holder)
        journal.set_class(holder, _counting_class(kind))
        tally.mark(holder, journal)
        adapter.repin(module, journal)
    return True


@cache
def _counting_class(cls: type) -> type:
    """A subclass of a class of ours whose methods count."""
    own = {name: value for name, value in vars(cls).items() if name.startswith("fastkernels")}
    methods = {n: counted(f) for n, f in vars(cls).items() if isinstance(f, FunctionType) and n[0] != "_"}
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**methods, **own, **named})
