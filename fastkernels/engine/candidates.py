"""Our engine as a host: its modules are ours already, so a patch puts a user's candidates in, and rows show calls.

A Request is carried out in every rank, each of which answers (patch.Host.call says how an answer looks). Graphs are
captured again when all ranks have changed: capture runs collectives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from fastkernels.core import candidate as loader
from fastkernels.core import registry
from fastkernels.core.dispatch import OPS, fusions_of, proving
from fastkernels.core.env import Environment
from fastkernels.patch import PatchError, Request, Row

if TYPE_CHECKING:
    from fastkernels.engine.execution.executor import Executor
    from fastkernels.engine.execution.runner import ModelRunner

Reply = dict[str, Any]
UNCALLED = "candidate: nothing has called it"


class Patched:
    """A patch of an engine, on all of its ranks."""

    def __init__(self, executor: Executor, request: Request):
        """Put the request's candidates in. On any failure nothing has changed. Raises PatchError, with every rank's."""
        self._executor, self._changed = executor, bool(request.candidates)
        self.replies: list[Reply] = executor.call(carry_out, request)
        errors = [f"rank {r['rank']}: {r['error']}" for r in self.replies if r["error"]]
        if len(errors) < len(self.replies) and errors:
            executor.call(carry_out, Request("undo"))
        if errors:
            one = len(self.replies) == 1
            raise PatchError(self.replies[0]["error"] if one else "; ".join(errors))
        if self._changed:
            try:
                executor.call("capture")
            except Exception as error:
                if not getattr(error, "fatal", False):  # else there is no rank left to put back
                    self.undo()
                raise PatchError(f"the patched model cannot be captured: {error}") from error

    def report(self) -> list[Reply]:
        """The rows of every rank, with the counters as they are now."""
        return self._executor.call(carry_out, Request("report"))

    def reset(self) -> list[Reply]:
        """Set the counters of every rank to zero."""
        return self._executor.call(carry_out, Request("reset"))

    def undo(self) -> list[Reply]:
        """Put functions and classes back as they were, and capture graphs again if anything had changed."""
        replies = self._executor.call(carry_out, Request("undo"))
        if self._changed:
            self._executor.call("capture")
        return replies


def from_environment(executor: Executor) -> Patched | None:
    """The patch that FASTKERNELS_CANDIDATES asks of an engine being built; None where there are none."""
    env = Environment.read()
    if not env.candidates:
        return None
    registry.check_names(env.candidates)
    wanted = {op: path for op, path in env.candidates.items() if op not in env.disable}
    return Patched(executor, Request("patch", None, wanted))


@dataclass
class RankPatch:
    """What a patch changed in this rank's model, and its rows."""

    rows: list[Row] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)
    put: list[Put] = field(default_factory=list)

    def put_in(self, model: nn.Module, name: str, path: str) -> None:
        """A candidate's function before the op's providers, its classes as `__class__` of their instances."""
        found, done = loader.load(name, path), Put(name, path)
        self.put.append(done)
        undo = loader.install(found)
        if undo is not None:
            self.steps.append(undo)
            done.kinds.append("function")
        for cls_name, cls in found.classes.items():
            ours: Any = registry.op_class(name, cls_name)
            methods = ("forward",) if hasattr(cls, "forward") else getattr(ours, "live_methods", ())
            body = {m: getattr(cls, m) for m in methods}
            live = type(ours.__name__, (ours,), {**body, "__module__": ours.__module__})
            for instance in _instances(model, ours):
                instance.__class__ = live
                self.steps.append(partial(setattr, instance, "__class__", ours))
                if "class" not in done.kinds:
                    done.kinds.append("class")
        if not done.kinds:
            done.problem = f"the model has no module of {', '.join(found.classes)}"

    def report(self) -> list[Row]:
        """The rows, with the counters as they are now."""
        for row in self.rows:
            ops = proving(row.op)
            row.calls = sum(op.calls for op in ops)
            row.fallbacks = {why: n for op in ops for why, n in op.fallbacks.items()}
            if not row.calls and not row.candidate:
                fused = [op for op in fusions_of(row.op) if op.calls]
                row.calls = sum(op.calls for op in fused)
                row.reason = f"{fused[0].name} runs in its place" if fused else row.reason
            row.proof = "calls" if row.calls else ""
            if row.reason == UNCALLED and row.calls:  # by the engine itself, as `sampling` is
                row.state, row.reason = "active", "candidate"
        return self.rows

    def reset(self) -> None:
        for op in OPS.values():
            op.reset()

    def undo(self) -> None:
        """Put functions and classes back as they were."""
        while self.steps:
            self.steps.pop()()


_patches: WeakKeyDictionary[ModelRunner, RankPatch] = WeakKeyDictionary()  # of the runners of this process


def carry_out(runner: ModelRunner, request: Request) -> Reply:
    """One request in this rank, its graphs aside. What goes wrong is in the reply's `error`."""
    patched = _patches.get(runner)
    try:
        if request.action == "patch":
            if patched is not None:
                raise PatchError("this engine is patched already: undo that first")
            patched = _patches[runner] = apply(runner, request)
        elif patched is None:
            raise PatchError("this engine is not patched")
        elif request.action == "undo":
            patched.undo()
            del _patches[runner]
        elif request.action == "reset":
            patched.reset()
    except Exception as error:
        known = isinstance(error, (PatchError, LookupError, ValueError))
        return reply(runner.rank, [], str(error) if known else f"{type(error).__name__}: {error}")
    return reply(runner.rank, patched.report())


def reply(rank: int, rows: list[Row], error: str | None = None) -> Reply:
    """A rank's answer, as patch.Host.call gives it."""
    from fastkernels import __version__

    head = {"rank": rank, "pid": os.getpid(), "host": "fastkernels", "version": __version__}
    return {**head, "rows": [asdict(row) for row in rows], "error": error}


def apply(runner: ModelRunner, request: Request) -> RankPatch:
    """Put the request's candidates in. On any failure nothing has changed. Raises PatchError, UnknownName."""
    patched = RankPatch()
    names = None if request.ops is None else registry.check_names(request.ops)
    try:
        for name, path in request.candidates.items():
            patched.put_in(runner.model, name, path)
        if request.candidates and not any(p.kinds for p in patched.put):
            raise PatchError("; ".join(f"candidate {p.path}: {p.problem}" for p in patched.put))
        patched.rows = rows(runner, names, patched.put)
        if not patched.rows:
            raise PatchError(f"nothing to patch: the model runs none of {', '.join(names or ())}")
        if request.strict and (off := [p for p in patched.put if not p.kinds]):
            raise PatchError("strict: " + "; ".join(f"candidate {p.path}: {p.problem}" for p in off))
        patched.reset()
    except Exception as error:
        patched.undo()
        if isinstance(error, (PatchError, registry.UnknownName)):
            raise
        raise PatchError(f"{type(error).__name__}: {error}") from error
    return patched


@dataclass
class Put:
    """A candidate that was asked for: what of it is in (`kinds`: function, class), or why it is not."""

    op: str
    path: str
    kinds: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def label(self) -> str:
        return f"{'+'.join(self.kinds)} {self.path}"


def _instances(model: nn.Module, ours: type) -> list[Any]:
    """The modules of exactly this class of ours, or the method objects of modules."""
    parts = [*model.modules(), *(getattr(m, "quant_method", None) for m in model.modules())]
    return list({id(p): p for p in parts if type(p) is ours}.values())


def rows(runner: ModelRunner, names: tuple[str, ...] | None = None, put: Sequence[Put] = ()) -> list[Row]:
    """One row for each op class in the model, and one for each op that only other modules call."""
    kinds: dict[str, list[type]] = {}
    model: nn.Module = runner.model
    for module in model.modules():
        for cls in type(module).__mro__:
            where = registry.op_of_class(cls)
            if where is not None and cls.__name__.startswith("Vllm"):
                kinds.setdefault(where, []).append(cls)
                break
    labels = {p.op: p.label for p in put if p.kinds}
    functions = {p.op for p in put if "function" in p.kinds}

    def row(op: str, name: str, modules: int) -> Row:
        reason = "candidate" if op in labels else ""
        inside = sorted(registry.reached(op) & functions)
        return Row(
            runner.rank,
            op,
            name,
            modules,
            "active",
            reason=reason,
            candidate=labels.get(op, ""),
            inside=inside,
        )

    found = [
        row(op, cls.__name__, kinds[op].count(cls))
        for op in sorted(kinds)
        for cls in dict.fromkeys(kinds[op])
    ]
    called = {c for op in kinds for c in registry.get(op).calls}
    found += [row(op, f"{op}()", 0) for op in sorted(called - set(kinds))]
    found += [
        Row(runner.rank, op, f"{op}()", 0, "off", reason=UNCALLED, candidate=labels[op])
        for op in sorted(set(labels) - set(kinds) - called)
    ]
    found += [
        Row(runner.rank, p.op, f"{p.op}()", 0, "off", reason=f"candidate {p.path}: {p.problem}")
        for p in put
        if not p.kinds
    ]
    return [r for r in found if names is None or r.op in names]
