"""apply(model, request): put our modules into a loaded model, in the process that runs it. The same for every host.

An adapter (one a host) says what is special about the host: see adapter.py. Everything that is changed is
written into a journal, so that undo, or a failure half way, puts all of it back.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastkernels.core import candidate as candidates_module
from fastkernels.core import registry
from fastkernels.core import tuning as tuned
from fastkernels.core.spec import OpSpec, Target
from fastkernels.overrides.linear.linear_fp8_layers import holder_of
from fastkernels.patch import PatchError, Request, Row
from fk_integrations.core.adapter import Adapter, Journal, live_class
from fk_integrations.seams.expert_layers import in_float8

if TYPE_CHECKING:
    from fastkernels.core.dispatch import Op

log = logging.getLogger("fastkernels")
LIVE_SEAMS = ("leaf", "module", "quant_method", "kernel", "scheme", "experts", "attention")
LEFT = "left to the host"


@dataclass
class Patched:
    """The state of one patched process."""

    adapter: Adapter
    model: Any
    request: Request
    rank: int
    journal: Journal = field(default_factory=Journal)
    candidates: dict[str, candidates_module.Candidate] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    traced: set[str] = field(default_factory=set)  # ops whose kernels a profiler trace has shown

    def report(self) -> list[dict[str, Any]]:
        from fastkernels.core.dispatch import proving

        for row in self.rows:
            ops = proving(row.op) if row.state == "active" else []
            if ops:
                row.calls = sum(op.calls for op in ops)
                row.fallbacks = {why: n for op in ops for why, n in op.fallbacks.items()}
                row.left = {why: n for op in ops for why, n in op.left.items()}
                row.proof = "trace" if row.op in self.traced else "calls" if row.calls else ""
        return [asdict(row) for row in self.rows]

    def reset(self) -> None:
        from fastkernels.core.dispatch import OPS

        for op in OPS.values():
            op.reset()

    def undo(self) -> None:
        self.journal.undo()


def apply(adapter: Adapter, model: Any, request: Request, rank: int = 0) -> Patched:
    """Swap every module that the request names. On any failure nothing has changed and PatchError is raised."""
    patched = Patched(adapter, model, request, rank)
    try:
        _load_candidates(patched)
        # Quantized layers first: what stays the host's before them depends on whether they do.
        for spec, target in sorted(
            plan(adapter, request, model), key=lambda found: found[1].seam != "kernel"
        ):
            patched.rows.append(_apply_target(patched, spec, target))
        patched.rows += _candidate_rows(patched)
        _strict(patched)
    except Exception as error:
        patched.journal.undo()
        if isinstance(error, PatchError):
            raise
        raise PatchError(f"{type(error).__name__}: {error}") from error
    patched.reset()
    return patched


def plan(adapter: Adapter, request: Request, model: Any = None) -> Iterator[tuple[OpSpec, Target]]:
    """The (op, target) pairs that the request asks for and this host version has a header for."""
    names = registry.op_names() if request.ops is None else registry.check_names(request.ops)
    for name in names:
        spec = registry.get(name)
        for target in adapter.targets(spec, model):
            wanted = target.default or request.ops is not None or name in request.candidates
            if target.seam in LIVE_SEAMS and (wanted or _by_table(spec, model)):
                yield spec, target


def _by_table(spec: OpSpec, model: Any) -> bool:
    """Whether an op that is off by default has a say by its tuned tables: on a GPU always, elsewhere if it has one."""
    if model is None or spec.tuned_by is None:
        return False
    device = _device(model)
    return device == "cuda" or bool(tuned.entries(spec.tuned_by.name, tuned.chip_of(device)))


def _device(model: Any) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def _load_candidates(patched: Patched) -> None:
    for name, path in patched.request.candidates.items():
        patched.candidates[name] = found = candidates_module.load(name, path)
        undo = candidates_module.install(found)
        if undo is not None:
            patched.journal.add(undo)


def _candidate_rows(patched: Patched) -> list[Row]:
    """Say in the rows which functions run inside; and a row for each candidate that none is of."""
    functions = {name for name, found in patched.candidates.items() if found.function is not None}
    active = [row for row in patched.rows if row.state == "active"]
    for row in active:
        row.inside = sorted(registry.reached(row.op) & functions)
    rows = []
    for name, found in patched.candidates.items():
        row = Row(patched.rank, name, f"{name}()", 0, "active", candidate=f"function {found.path}")
        if not any(other.op == name for other in active) and any(name in other.inside for other in active):
            rows.append(row)
        elif not any(other.op == name for other in patched.rows):
            row.state, row.candidate = "off", ""
            row.reason = f"candidate {found.path}: no module that was patched has or calls it"
            rows.append(row)
    return rows


def _apply_target(patched: Patched, spec: OpSpec, target: Target) -> Row:
    adapter, name = patched.adapter, target.path.partition(":")[2]
    row = Row(patched.rank, spec.name, name, 0, "off")
    asked = patched.request.ops is not None or spec.name in patched.candidates
    named = target.default or asked
    tuned_op = spec.tuned_by
    if spec.name in patched.request.disable or (not named and tuned_op.name in patched.request.disable):
        row.reason = "FASTKERNELS_DISABLE"
        return row
    mode = adapter.batch_invariant()
    if mode and (not spec.batch_invariant or spec.name in patched.candidates):
        row.reason = f"{mode} is on, and this op's results may depend on the batch"
        if not named:
            row.reason = f"{LEFT}: {row.reason}"
        return row
    host_class = _resolve(target.path)
    if host_class is None:
        row.reason = f"{target.path} is not in {adapter.host} {adapter.version}"
        return row
    modules = _instances(adapter, patched.model, spec, host_class, target.seam)
    device = _device(patched.model)
    if modules and not named and (untuned := tuned.untuned(tuned_op.name, device)):
        row.reason = f"{LEFT}: {untuned}"
        log.warning("%s: %s", spec.name, untuned)
        return row
    row.reason = adapter.unknown(target, host_class) or ""
    if row.reason:
        return row
    ours = _our_class(patched, spec, target)
    reasons: dict[str, int] = {}
    others = _passed_over(patched.model, host_class) if target.seam == "quant_method" else []
    for why in others:
        line = f"{'unsupported' if named else LEFT}: {why}"
        reasons[line] = reasons.get(line, 0) + 1
    for module in modules:
        slower = None if named else _not_faster(adapter, tuned_op, module, device)
        if named and not asked:
            slower = adapter.fused(patched.model, spec.name, module)
        reason = slower or _swap(patched, module, host_class, ours, target.seam, by_table=not named)
        if reason is None:
            row.modules += 1
        else:
            # What nobody asked for is not missed: a backend that our attention does not go into, for one.
            left = slower or (not named and target.seam in ("attention", "experts"))
            reason = f"{LEFT}: {reason.replace('; ', ', ')}" if left else f"unsupported: {reason}"
            reasons[reason] = reasons.get(reason, 0) + 1
    row.state = "active" if row.modules else "off"
    found = patched.candidates.get(spec.name)
    if found is not None and row.modules:
        there = (("function", found.function and spec.op), ("class", target.cls in found.classes))
        kinds = "+".join(kind for kind, is_there in there if is_there)
        row.candidate = f"{kinds} {found.path}" if kinds else ""
    # What was left to the host comes last: alone it is no failure, and _strict lets it pass.
    row.reason = "; ".join(f"{n} {why}" for why, n in sorted(reasons.items(), key=lambda r: LEFT in r[0]))
    if not row.modules and not reasons:
        row.reason = "the model has no such module"
    return row


def _not_faster(adapter: Adapter, op: Op, module: Any, device: str) -> str | None:
    assert op.key is not None
    shape = adapter.shape(op, module)
    return shape if isinstance(shape, str) else tuned.not_faster(op.name, op.key, shape, device)


def _our_class(patched: Patched, spec: OpSpec, target: Target) -> type:
    found = patched.candidates.get(spec.name)
    if found is not None and target.cls in found.classes:
        return found.classes[target.cls]
    return registry.target_class(target)


def _instances(adapter: Adapter, model: Any, spec: OpSpec, host_class: type, seam: str) -> list[Any]:
    """The modules of exactly this class, each once. Somebody else's subclass or patch is not ours to touch.

    A target at the seam 'quant_method' or 'scheme' may name the class of that object instead of the module's, one at
    the seam 'attention' that of `impl`. It must be the module's own: a LoRA wrapper shows its base layer's. At the
    seam 'kernel' it is the class of what the method or the scheme holds. At the seam 'experts' they are all layers
    of experts in the op's kind of numbers: what runs those is looked at in Adapter.swap_experts.
    """
    if seam == "experts":
        found = [m for m in model.modules() if adapter.experts(m) is not None]
        return [m for m in found if in_float8(m) == spec.name.endswith("_fp8")]
    if seam == "kernel":
        holders = ((m, holder_of(m)) for m in model.modules())
        return [m for m, holder in holders if holder is not None and type(holder.fp8_linear) is host_class]
    part = {"quant_method": "quant_method", "scheme": "scheme", "attention": "impl"}.get(seam, "")
    return [m for m in model.modules() if type(m) is host_class or type(vars(m).get(part)) is host_class]


def _passed_over(model: Any, host_class: type) -> list[str]:
    """Why, for each module whose method object is another of the same family: quantized linear layers."""
    family = host_class.__base__
    if family is None or family.__name__ != "LinearMethodBase":
        return []
    methods = [type(vars(m).get("quant_method")) for m in model.modules()]
    others = [m for m in methods if issubclass(m, family) and m is not host_class]
    return [f"quant_method is {m.__module__}.{m.__qualname__}, not {host_class.__qualname__}" for m in others]


def _swap(
    patched: Patched, module: Any, host_class: type, ours: type, seam: str, by_table: bool
) -> str | None:
    supports = getattr(ours, "supports", None)
    reason = supports(module) if supports is not None else None
    if reason is None:
        reason = _replaced(module)
    if reason is not None:
        return reason
    if seam == "quant_method":
        return patched.adapter.swap_quant_method(module, ours, patched.journal)
    if seam == "kernel":
        return patched.adapter.swap_kernel(module, ours, patched.journal)
    if seam == "scheme":
        return patched.adapter.swap_scheme(module, ours, patched.journal, by_table)
    if seam == "experts":
        return patched.adapter.swap_experts(module, ours, patched.journal, by_table)
    if seam == "attention":
        return patched.adapter.swap_attention(module, ours, patched.journal, by_table)
    module.__class__ = live_class(host_class, ours)
    patched.journal.add(lambda: setattr(module, "__class__", host_class))
    patched.adapter.repin(module, patched.journal)
    return None


def _replaced(module: Any) -> str | None:
    """Why this instance is not ours to touch: somebody has put a method of their own into it."""
    named = [
        n
        for n, v in vars(module).items()
        if n.startswith("forward") and callable(v) and hasattr(type(module), n)
    ]
    return f"its {named[0]} was replaced by somebody else" if named else None


def _strict(patched: Patched) -> None:
    if patched.request.strict:
        off = [
            f"{r.op} ({r.host_class}): {r.reason}"
            for r in patched.rows
            if r.reason and r.reason != "FASTKERNELS_DISABLE" and not _left(r)
        ]
        off = [line for line in off if not line.endswith("the model has no such module")]
        if off:
            raise PatchError("strict: " + "; ".join(off))
    if patched.adapter.whole and not any(r.state == "active" for r in patched.rows):
        why = "; ".join(f"{r.op} ({r.host_class}): {r.reason}" for r in patched.rows) or "no op was asked for"
        raise PatchError(f"nothing to patch: {why}")


def _left(row: Row) -> bool:
    """Whether all that a row's reason says is which modules are faster, or not known to be slower, as they are."""
    return all(f"{LEFT}: " in part for part in row.reason.split("; "))


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
