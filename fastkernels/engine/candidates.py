"""Our engine as a host: its modules are ours already, so a patch puts a user's candidates in, and rows show calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from fastkernels import candidate as loader
from fastkernels import registry
from fastkernels.dispatch import OPS, Op, Provider
from fastkernels.env import Environment
from fastkernels.patch import PatchError, Request, Row

if TYPE_CHECKING:
    from .runner import ModelRunner


@dataclass
class Patched:
    """What a patch changed in a runner, and its rows."""

    runner: ModelRunner
    rows: list[Row] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)

    def report(self) -> list[Row]:
        """The rows, with the counters as they are now."""
        for row in self.rows:
            ops = registry.counted(row.op)
            row.calls = sum(op.calls for op in ops)
            row.fallbacks = {why: n for op in ops for why, n in op.fallbacks.items()}
            row.proof = "calls" if row.calls else ""
        return self.rows

    def reset(self) -> None:
        for op in OPS.values():
            op.reset()

    def undo(self) -> None:
        """Put functions and classes back as they were, and capture graphs again if anything had changed."""
        changed = bool(self.steps)
        while self.steps:
            self.steps.pop()()
        if changed:
            self.runner.capture()


def apply(runner: ModelRunner, request: Request) -> Patched:
    """Put the request's candidates in. On any failure nothing has changed. Raises PatchError, UnknownName."""
    patched = Patched(runner)
    names = None if request.ops is None else registry.check_names(request.ops)
    try:
        swapped = _put_in(patched, request.candidates)
        patched.rows = rows(runner.model, names, swapped)
        if not patched.rows:
            raise PatchError(f"nothing to patch: the model runs none of {', '.join(names or ())}")
        patched.reset()
        if request.candidates:
            runner.capture()
    except Exception as error:
        patched.undo()
        if isinstance(error, (PatchError, registry.UnknownName)):
            raise
        raise PatchError(f"{type(error).__name__}: {error}") from error
    return patched


def from_environment(runner: ModelRunner) -> Patched | None:
    """The patch that FASTKERNELS_CANDIDATES asks of an engine being built; None where there are none."""
    env = Environment.read()
    if not env.candidates:
        return None
    registry.check_names(env.candidates)
    wanted = {op: path for op, path in env.candidates.items() if op not in env.disable}
    return apply(runner, Request("patch", None, wanted))


def _put_in(patched: Patched, candidates: Mapping[str, str]) -> set[str]:
    """Functions replace the op's providers, classes the `__class__` of their instances. Returns the ops changed."""
    changed = set()
    for name, path in candidates.items():
        found = loader.load(name, path)
        op, module = registry.get(name).op, registry.op_module(name)
        if found.function is not None and op is not None:
            patched.steps.append(partial(_restore, op, op.candidate))
            op.set_candidate(found.function, f"candidate {path}")
            changed.add(name)
        for cls_name, cls in found.classes.items():
            ours: Any = getattr(module, cls_name)
            body = {"forward": getattr(cls, "forward"), "__module__": ours.__module__}  # noqa: B009
            live = type(ours.__name__, (ours,), body)
            for instance in [m for m in patched.runner.model.modules() if type(m) is ours]:
                instance.__class__ = live
                patched.steps.append(partial(setattr, instance, "__class__", ours))
                changed.add(name)
        if name not in changed:
            raise PatchError(f"candidate {path}: the model has no module of {', '.join(found.classes)}")
    return changed


def _restore(op: Op, previous: Provider | None) -> None:
    if previous is None:
        op.set_candidate(None)
    else:
        op.set_candidate(previous.fn, previous.name)


def rows(
    model: nn.Module, names: tuple[str, ...] | None = None, changed: set[str] | None = None
) -> list[Row]:
    """One row for each op class in the model, and one for each op that only other modules call."""
    kinds: dict[str, list[type]] = {}
    for module in model.modules():
        for cls in type(module).__mro__:
            where = cls.__module__.rpartition(".")[2]
            if registry.op_modules().get(where) == cls.__module__ and cls.__name__.startswith("Vllm"):
                kinds.setdefault(where, []).append(cls)
                break
    found = [
        Row(
            0,
            op,
            cls.__name__,
            kinds[op].count(cls),
            "active",
            reason="candidate" if op in (changed or ()) else "",
        )
        for op in sorted(kinds)
        for cls in dict.fromkeys(kinds[op])
    ]
    called = {c for op in kinds for c in registry.get(op).calls}
    functions = sorted((called | (changed or set())) - set(kinds))
    found += [
        Row(0, op, f"{op}()", 0, "active", reason="candidate" if op in (changed or ()) else "")
        for op in functions
    ]
    return [r for r in found if names is None or r.op in names]


def identity() -> dict[str, object]:
    """The head of a reply of this process."""
    from fastkernels import __version__

    return {"rank": 0, "pid": os.getpid(), "host": "fastkernels", "version": __version__, "error": None}
