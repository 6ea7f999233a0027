"""apply(adapter, model, request): put our modules into a loaded model, in its own process. The same for every host.

An adapter states what is special about a host (adapter.py), a seam how a module gets our code (seam_interface.py).
Every change is noted in a journal, so that undo, or a failure half way, restores the model.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fastkernels.core import candidate, registry, tuning
from fastkernels.core.candidate import Candidate
from fastkernels.core.candidate_scopes import Scope
from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Phrase, Reason
from fastkernels.core.runtime.trial import within
from fastkernels.core.spec import OpSpec, Target
from fastkernels.patch import PatchError, Request, Row, nothing_patched
from fastkernels.verify.phases import Seconds, timed
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.gated_products import NAME as GATED
from fk_integrations.core.instance_class import is_bound_method
from fk_integrations.core.journal import Journal
from fk_integrations.live import asleep, traced, trials
from fk_integrations.live.engine_counts import EngineCounts
from fk_integrations.live.prepared import prepare
from fk_integrations.live.tally import Counts, Tally
from fk_integrations.live.traced import Decided, Traced
from fk_integrations.live.trials import Trial
from fk_integrations.patching import choose, gated_products, seam_interface
from fk_integrations.patching.seam_interface import Seam, Swap

if TYPE_CHECKING:
    pass

log = logging.getLogger("fastkernels")


_SLOWER = Reason(Kind.LEFT_TO_HOST, "not faster than the host's at their first calls")
_SLOWER_SO_FAR = Reason(Kind.LEFT_TO_HOST, f"{_SLOWER.text}; torch.compile measures them again")


@dataclass
class Patched:
    """The state of one patched process.

    whole       whether the patch is complete; False: it is being made or undone, or that was interrupted
    traced      ops whose kernels a profiler trace has shown
    every_step  ids of the rows whose modules a model calls in every step, or never
    trials      {id of a row: the trial that decides about it, the reasons of its other modules}
    counts      the calls in the modules of each row
    module_calls  {op: calls of its modules}, for seams whose calls are counted so
    seconds     of each phase of the patch
    group       of all trials, where the host's shapes change together
    session     of the decisions about compiled code
    scope       the calls in which its candidates run
    """

    adapter: Adapter
    model: Any
    request: Request
    rank: int
    journal: Journal = field(default_factory=Journal)
    whole: bool = False
    candidates: dict[str, Candidate] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    traced: set[str] = field(default_factory=set)
    every_step: set[int] = field(default_factory=set)
    trials: dict[int, tuple[Trial, dict[Reason, int]]] = field(default_factory=dict)
    module_calls: Counter[str] = field(default_factory=Counter)
    counts: Counts | EngineCounts = field(init=False)
    seconds: Seconds = field(default_factory=dict)
    group: asleep.Group = field(default_factory=lambda: asleep.Group(together=True))
    session: Traced = field(init=False)
    scope: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.scope = self.adapter.scope() or self._scope()
        self.counts = Counts() if self.adapter.several else EngineCounts(self.scope)
        self.session = Traced(self.adapter.host, self.adapter.version)

    def _scope(self) -> Scope:
        """The calls in modules of this patch. Compiled code belongs to no module, and an engine calls ops itself."""
        name, this = f"the {self.adapter.host} model {type(self.model).__name__}", weakref.ref(self)

        def outside(op: str) -> bool:
            patched = this()
            if patched is None or not patched.journal.steps:  # undone
                return False
            return not patched.adapter.several or patched.counts.compiled(op)

        return Scope(name, outside)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies of a model, and pickled ones, are the host's

    @property
    def unchanged(self) -> bool:
        """Whether everything was left to the host: no module has other code than before."""
        return not self.candidates and all(row.state != "active" for row in self.rows)

    def report(self) -> list[dict[str, Any]]:
        """The rows as dicts, with the counters as they are now."""
        for row in self.rows:
            if id(row) in self.trials:
                self._decided(row, *self.trials[id(row)])
            if row.state == "active" or Kind.CANDIDATE_UNCALLED in row.kinds:
                self._count(row)
        active = [row for row in self.rows if row.state == "active"]
        if any(row.calls for row in active):
            for row in active:
                if not row.calls and not row.proof and id(row) in self.every_step:
                    row.proof = "uncalled"
        return [asdict(row) for row in self.rows]

    def _decided(self, row: Row, trial: Trial, others: dict[Reason, int]) -> None:
        """Bring a row up to date with what the first calls have decided."""
        row.modules, row.measured = trial.modules - trial.restored - trial.left, trial.lines()
        row.state = "active" if row.modules else "off"
        left = {_SLOWER: trial.restored, _SLOWER_SO_FAR: trial.left}
        row.explain({**others, **{reason: n for reason, n in left.items() if n}})

    def _count(self, row: Row) -> None:
        from fastkernels.core.dispatch import fusions_of, proving

        if row.op in self.module_calls:
            row.calls = self.module_calls[row.op]
            row.proof = "calls" if row.calls else ""
            return
        ops = proving(row.op)
        if not ops:
            return
        row.own = not self.adapter.own
        row.calls = self.counts.calls(row, ops)
        row.fallbacks = self.counts.reasons(row, "fallbacks", ops)
        row.left = self.counts.reasons(row, "left", ops)
        if not row.calls and not row.candidate:
            fused = {op.name: calls for op in fusions_of(row.op) if (calls := self.counts.calls(row, [op]))}
            row.calls = sum(fused.values())
            if fused:
                row.explain({Reason(Kind.FUSED, f"{next(iter(fused))} runs in its place"): 0})
        if row.calls and Kind.CANDIDATE_UNCALLED in row.kinds:
            row.state = "active"
            row.explain({Reason(Kind.CANDIDATE, "candidate"): 0})
        row.proof = "trace" if row.op in self.traced else "calls" if row.calls else ""
        if row.proof == "calls" and row.calls <= self.counts.plain(row, ops):
            row.proof = "fell back"

    def reset(self) -> None:
        from fastkernels.core.dispatch import OPS

        for op in OPS.values():
            op.reset()
        self.counts.clear()
        self.module_calls = Counter(dict.fromkeys(self.module_calls, 0))

    def meant_by(self, request: Request) -> bool:
        """Whether an undo, report or reset is about this patch, and not about an earlier one of the same model."""
        return request.patch in ("", self.request.patch)

    def undo(self) -> None:
        """Restore everything. After an interruption, a second call continues."""
        self.whole = False
        self.journal.undo()


def _nowhere(patched: Patched) -> None:
    """For callers without a place from which a later call could undo an interrupted patch."""


def apply(
    adapter: Adapter, model: Any, request: Request, rank: int = 0, begun: Callable[[Patched], None] = _nowhere
) -> Patched:
    """Swap every module that the request names. Raises PatchError; nothing has changed then.

    begun  gets the patch before anything changes, and keeps it: if this call is interrupted, and the undo in it too,
           `undo` of that patch restores the rest
    """
    patched = change(adapter, model, request, rank, begun)
    patched.reset()
    if rank == 0 or not adapter.whole:
        log.info("%s", summary(patched))
    return patched


def change(
    adapter: Adapter, model: Any, request: Request, rank: int = 0, begun: Callable[[Patched], None] = _nowhere
) -> Patched:
    """`apply`, with the counters as they were."""
    patched = Patched(adapter, model, request, rank)
    try:
        begun(patched)
        _add_providers(patched)
        _load_candidates(patched)
        verified = choose.Verified(dict(adapter.measured))
        if not adapter.own:
            verified = choose.verify(adapter, model, request, _device_of(model), patched.journal)
        patched.seconds |= verified.seconds
        with timed(patched.seconds, "swap modules"):
            _swap_modules(patched)
        _add_measured(patched.rows, verified.measured)
        if adapter.own and request.ops is not None:
            patched.rows = [row for row in patched.rows if row.op in request.ops]
        _check(patched)
    except BaseException as error:
        patched.journal.undo()
        if isinstance(error, PatchError) or not isinstance(error, (Exception, SystemExit)):
            raise
        raise PatchError(f"{type(error).__name__}: {error}") from error
    return patched


def _swap_modules(patched: Patched) -> None:
    """Swap all modules of the request, and make the rows."""
    adapter, model, request, rank = patched.adapter, patched.model, patched.request, patched.rank
    found = sorted(plan(adapter, request, model), key=lambda pair: seam_interface.find(pair[1].seam).order)
    for spec, target in found:
        patched.rows.append(_apply_target(patched, spec, target))
    patched.rows += _rows_without_a_table(patched, {spec.name for spec, _ in found})
    patched.rows += _gated_rows(patched)
    patched.rows += _called_rows(patched)
    patched.rows += _candidate_rows(patched)
    patched.rows += absent_rows(adapter, request, model, patched.rows, rank)
    patched.rows = _without_absent(patched.rows)
    _alternatives(patched)
    _watch(patched)
    _annotate(patched)
    patched.rows += _uncovered_rows(adapter, request, model, rank)


def _alternatives(patched: Patched) -> None:
    """Rows of one op with modules in common: a step runs one of them, such as a recurrence's for single tokens."""
    tallies = patched.counts.of
    for key, tally in tallies.items():
        modules = set(map(id, tally.modules))
        others = (t for t in tallies.values() if t is not tally and t.op == tally.op)
        if any(not modules.isdisjoint(map(id, other.modules)) for other in others):
            patched.every_step.discard(key)


def _watch(patched: Patched) -> None:
    """Count the calls of all rows from now on."""
    counts = patched.counts
    if isinstance(counts, EngineCounts):
        ops = [row.op for row in patched.rows if row.state == "active"]
        counts.watch_rows(ops, patched.adapter, patched.model, patched.journal)
    else:
        counts.watch()


def plan(adapter: Adapter, request: Request, model: Any = None) -> Iterator[tuple[OpSpec, Target]]:
    """The (op, target) pairs that the request includes and this host version has a live seam for."""
    every = request.ops is None or adapter.own  # our engine's rows of other ops are dropped later
    names = registry.op_names() if every else registry.check_names(request.ops or ())
    for name in dict.fromkeys([*names, *(request.candidates if adapter.own else ())]):
        spec = registry.get(name)
        for target in adapter.targets(spec, model):
            included = (
                target.default or _requested(request, name) or (target.tried and _decides(adapter, model))
            )
            if seam_interface.find(target.seam).live and (included or _by_table(spec, model)):
                yield spec, target


def _decides(adapter: Adapter, model: Any) -> bool:
    """Whether first calls of this model decide."""
    return model is not None and trials.decides(adapter, _device(model))


def _requested(request: Request, op: str) -> bool:
    return request.ops is not None or op in request.candidates


def _by_table(spec: OpSpec, model: Any) -> bool:
    """Whether tuned tables decide on an op that is off by default: always on a GPU, elsewhere if there is a table."""
    if model is None or spec.tuned_by is None:
        return False
    device = _device(model)
    return device == "cuda" or bool(tuning.entries(spec.tuned_by.name, tuning.chip_of(device)))


def _device(model: Any) -> str:
    return str(_device_of(model).type)


def _device_of(model: Any) -> Any:
    import torch

    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _add_measured(rows: list[Row], measured: dict[str, list[str]]) -> None:
    """Add what was measured for an op to the first row that depends on it."""
    for op, lines in measured.items():
        for row in rows:
            found = registry.get(row.op).tuned_by
            if found is not None and found.name == op:
                row.measured = lines
                break


def _add_providers(patched: Patched) -> None:
    """Add the host's own kernels that FASTKERNELS_PROVIDER names to the providers of their ops."""
    wanted = Environment.read().provider
    for name, provider in patched.adapter.providers().items():
        op = registry.get(name).op
        if wanted.get(name) == provider.name:
            added = replace(provider)  # another patch may add the same one, and is undone apart

            def undo(op: Any = op, added: Any = added) -> None:
                op.providers = tuple(p for p in op.providers if p is not added)
                op.forget()

            patched.journal.add(undo)
            op.providers = (*op.providers, added)
            op.forget()
    for name in wanted:
        if name in registry.op_modules() and (op := registry.get(name).op) is not None:
            op.order(_device(patched.model))  # raises ValueError for an unknown provider


def _load_candidates(patched: Patched) -> None:
    for name, path in patched.request.candidates.items():
        with within(Environment.read().trial_s, f"the import of candidate {path}"):
            patched.candidates[name] = found = candidate.load(name, path)
        if candidate.install(found, partial(_until_undone, patched), patched.scope):
            names = f"{patched.scope.candidates} {found.module.__name__}"
            patched.journal.set_attribute(patched.scope, "candidates", names)


def _until_undone(patched: Patched, undo: Callable[[], None]) -> None:
    """Note the undo of a candidate, which also runs if the model goes away without one."""
    patched.journal.add(undo)
    weakref.finalize(patched, undo).atexit = False


def _apply_target(patched: Patched, spec: OpSpec, target: Target) -> Row:
    row = Row(patched.rank, spec.name, target.name, 0, "off")
    requested = _requested(patched.request, spec.name)
    decides = not requested and _decides(patched.adapter, patched.model)
    by_table = not requested and not target.default and not (target.tried and decides)
    host_class = seam_interface.host_class(target)
    whole = _why_off(patched, spec, target, host_class, by_table)
    if whole is not None:
        row.explain({whole: 0})
        return row
    place = seam_interface.find(target.seam)
    modules = place.modules(patched.adapter, patched.model, spec.name, host_class)
    if (applies := getattr(registry.target_class(target), "applies", None)) is not None:
        modules = [module for module in modules if applies(module)]
    whole = _why_all_off(patched, spec, target, host_class, modules, by_table)
    if whole is not None:
        row.explain({whole: 0})
        return row
    reasons: Counter[Reason] = Counter()
    known = cache(partial(_has_target, patched.adapter, patched.model))
    for reason in place.passed_over(patched.model, host_class, known):
        reasons[_unless_requested(reason) if by_table else reason] += 1
    ours = _our_class(patched, spec, target)
    trial = None
    if place.decided and decides and not by_table:
        trial = Trial(spec.name, host_class)
        unmeasured = traced.why_not(_device_of(patched.model))
        if target.compiled and unmeasured is not None:
            trial.uncompiled = unmeasured
        elif target.compiled:
            trial.compiled = Decided(patched.session)
        if patched.adapter.shapes_together:
            trial.group = patched.group
    tally = None if patched.adapter.own else Tally(spec.name, patched.scope)
    named = requested or spec.name in Environment.read().provider
    captures = patched.adapter.captures() if place.short and not named else None
    inside = tally if patched.adapter.several or place.tallies else None  # the seam counts the calls
    for module in modules:
        if isinstance(captures, Reason):
            reasons[captures] += 1
            continue
        stays = _stays(patched, spec, target, module, by_table, requested)
        if stays is None:
            trained = spec.name if patched.adapter.trained else ""
            journal = patched.journal
            made = Swap(
                patched.adapter,
                module,
                host_class,
                ours,
                journal,
                by_table,
                trial,
                trained,
                inside,
                spec.name,
                captures,
            )
            stays = _swap(place, made)
            if stays is None:
                prepare(module, ours, journal)
                if place.counted:
                    _count_calls(patched, spec.name, module)
            if stays is not None and by_table and place.optional:
                stays = _unless_requested(stays)
        if stays is None:
            row.modules += 1
            if tally is not None and inside is None:
                tally.modules.append(module)
        else:
            reasons[stays] += 1
    if tally is not None and row.modules:
        patched.counts.of[id(row)] = tally
        if place.tallies and isinstance(patched.counts, EngineCounts):
            patched.counts.alone.add(id(tally))
    row.state = "active" if row.modules else "off"
    row.captured = bool(row.modules) and captures is not None
    row.candidate = _candidate_label(patched.candidates.get(spec.name), target.cls) if row.modules else ""
    if not row.modules and not reasons:
        reasons[Reason(Kind.NO_SUCH_MODULE, "the model has no such module")] = 0
    row.explain(reasons)
    if trial is not None and row.modules:
        patched.trials[id(row)] = trial, dict(reasons)
    if place.every_step and not by_table and not row.candidate:
        patched.every_step.add(id(row))
    return row


def _count_calls(patched: Patched, op: str, module: Any) -> None:
    """Count the calls of this module; those of a captured graph count at its capture."""
    patched.module_calls[op] += 0
    hook = module.register_forward_pre_hook(lambda *_: patched.module_calls.update([op]))
    patched.journal.add(hook.remove)


def _rows_without_a_table(patched: Patched, planned: set[str]) -> list[Row]:
    """Rows of ops that only a tuned table puts in, on a device without one: their modules stay with the host."""
    adapter, model, made = patched.adapter, patched.model, []
    known = cache(partial(_has_target, adapter, model))
    for name in registry.op_names() if patched.request.ops is None and not adapter.own else ():
        spec = registry.get(name)
        if spec.tuned_by is None or name in planned:
            continue
        for target in adapter.targets(spec, model):
            place, host_class = seam_interface.find(target.seam), seam_interface.host_class(target)
            if not place.live or host_class is None:
                continue
            whole = _why_off(patched, spec, target, host_class, by_table=True)
            no_table = f"no tuned table of this device ({_device(model)}) lists a kernel of ours"
            supports = getattr(registry.target_class(target), "supports", None)
            reasons: Counter[Reason] = Counter()
            for module in place.modules(adapter, model, name, host_class):
                text = (supports(module) if supports is not None else None) or no_table
                reasons[Reason(Kind.LEFT_TO_HOST, text)] += 1
            for reason in place.passed_over(model, host_class, known):
                reasons[_unless_requested(reason)] += 1
            if reasons:
                made.append(Row(patched.rank, name, target.name, 0, "off"))
                made[-1].explain({whole: 0} if whole else reasons)
    return made


def _gated_rows(patched: Patched) -> list[Row]:
    """Rows of blocks whose product of gate and up is computed with its activation, one for each class of blocks."""
    request, device, made = patched.request, _device(patched.model), []
    if not gated_products.requested(request) and not _by_table(registry.get(GATED), patched.model):
        return []
    done = gated_products.apply(patched.adapter, request, patched.model, device, patched.journal)
    for name in dict.fromkeys([*done.modules, *done.reasons]):
        row = Row(patched.rank, GATED, name, done.modules[name], "off")
        row.explain(done.reasons.get(name, {}))
        if row.modules:
            row.state, row.candidate = "active", _candidate_label(patched.candidates.get(GATED))
            patched.every_step.add(id(row))  # else a report without a prompt would lack a proof
        made.append(row)
    return made


def _without_absent(rows: list[Row]) -> list[Row]:
    """The rows without those of classes that the model does not have; an op without any other keeps one of them."""
    shown = {row.op for row in rows if row.kinds != [Kind.NO_SUCH_MODULE]}
    kept = []
    for row in rows:
        if row.kinds != [Kind.NO_SUCH_MODULE]:
            kept.append(row)
        elif row.op not in shown:
            shown.add(row.op)
            kept.append(row)
    return kept


def _has_target(adapter: Adapter, model: Any, path: str) -> bool:
    """Whether a host class has a row of its own."""
    targets = (
        target for name in registry.op_names() for target in adapter.targets(registry.get(name), model)
    )
    return any(target.path == path and seam_interface.find(target.seam).live for target in targets)


def _why_off(
    patched: Patched, spec: OpSpec, target: Target, host_class: Any, by_table: bool
) -> Reason | None:
    """Why this op is off whatever modules the model has."""
    adapter, disable = patched.adapter, patched.request.disable
    if spec.name in disable or (by_table and spec.tuned_by.name in disable):
        return Reason(Kind.DISABLED, "FASTKERNELS_DISABLE")
    mode = adapter.batch_invariant()
    if mode and (not spec.batch_invariant or spec.name in patched.candidates):
        kind = Kind.LEFT_TO_HOST if by_table else Kind.BATCH_INVARIANT
        return Reason(kind, f"{mode} is on, and this op's results may depend on the batch")
    if host_class is None:
        return Reason(Kind.NOT_IN_HOST, f"{target.path} is not in {adapter.host} {adapter.version}")
    return None


def _why_all_off(
    patched: Patched, spec: OpSpec, target: Target, host_class: Any, modules: list[Any], by_table: bool
) -> Reason | None:
    """Why none of the modules is to be changed."""
    adapter, device = patched.adapter, _device(patched.model)
    if modules and by_table and (untuned := tuning.untuned(spec.tuned_by.name, device)):
        log.warning("%s: %s", spec.name, untuned)
        return Reason(Kind.UNTUNED, untuned)
    if modules and device == "cpu" and adapter.faster_on_cpu and not by_table:
        named = _requested(patched.request, spec.name) or spec.name in Environment.read().provider
        if not named:
            return Reason(
                Kind.LEFT_TO_HOST, f"on a CPU our {spec.name} is plain PyTorch, slower than the host's"
            )
    return adapter.unknown(target, host_class) if modules else None


def _stays(
    patched: Patched, spec: OpSpec, target: Target, module: Any, by_table: bool, requested: bool
) -> Reason | None:
    """Why an op that was not requested leaves this module to the host."""
    if requested:
        return None
    if not by_table:
        return patched.adapter.fused(patched.model, spec.name, module)
    op = spec.tuned_by
    shape = patched.adapter.of(op.name).shape(op, module)
    if isinstance(shape, Reason):
        return _unless_requested(shape)
    supports = getattr(registry.target_class(target), "supports", None)
    if shape is None and supports is not None and (text := supports(module)) is not None:
        return Reason(Kind.LEFT_TO_HOST, text)
    decodes = patched.adapter.prompts_in_pass(op.name, module)
    slower = tuning.not_faster(op.name, op.key, shape, _device(patched.model), decodes)
    return None if slower is None else Reason(Kind.LEFT_TO_HOST, slower)


def _unless_requested(reason: Reason) -> Reason:
    """The reason of a module that the host keeps because the op was not requested."""
    return Reason(Kind.LEFT_TO_HOST, reason.text)


def _our_class(patched: Patched, spec: OpSpec, target: Target) -> type:
    found = patched.candidates.get(spec.name)
    if found is not None and target.cls in found.classes:
        return found.classes[target.cls]
    return registry.target_class(target)


def _swap(place: Seam, swap: Swap) -> Reason | None:
    if swap.adapter.own and swap.ours is swap.host_class:
        return None  # nothing to change
    supports = getattr(swap.ours, "supports", None)
    text = supports(swap.module) if supports is not None else None
    if text is not None:
        return Reason(Kind.UNSUPPORTED, text)
    return _patched_by_others(swap.module) or place.swap(swap)


def _patched_by_others(module: Any) -> Reason | None:
    """Why an instance with a forward of its own stays as it is."""
    methods = [
        name
        for name, value in vars(module).items()
        if name.startswith("forward")
        and callable(value)
        and hasattr(type(module), name)
        and not is_bound_method(module, value)
    ]
    return Reason(Kind.REPLACED, f"its {methods[0]} was replaced by other code") if methods else None


def _candidate_label(found: Candidate | None, cls: str = "") -> str:
    """The parts of a candidate that run at a class: 'function PATH', 'class PATH', 'function+class PATH' or ''."""
    if found is None:
        return ""
    kinds = [
        kind for kind, used in (("function", _has_function(found)), ("class", cls in found.classes)) if used
    ]
    return f"{'+'.join(kinds)} {found.path}" if kinds else ""


def _has_function(found: Candidate) -> bool:
    return found.function is not None and registry.get(found.op).op is not None


def _called_rows(patched: Patched) -> list[Row]:
    """Rows of ops without a module of their own: in our engine all that are called, else candidates' functions."""
    active = {row.op for row in patched.rows if row.state == "active"}
    if patched.adapter.own:
        called = {op for name in active for op in registry.get(name).calls}
        # A module declares in `ops` those that its own code calls.
        called |= {op for m in patched.model.modules() for op in getattr(m, "ops", ())} & set(
            patched.candidates
        )
    else:
        functions = {name for name, found in patched.candidates.items() if _has_function(found)}
        called = functions & {op for name in active for op in registry.reached(name)}
    return [
        Row(patched.rank, op, f"{op}()", 0, "active", candidate=_candidate_label(patched.candidates.get(op)))
        for op in sorted(called - active)
    ]


def _candidate_rows(patched: Patched) -> list[Row]:
    """Rows of candidates that take part in no other row."""
    made = []
    for name, found in patched.candidates.items():
        rows = [row for row in patched.rows if row.op == name]
        if any(row.candidate for row in rows) if patched.adapter.own else rows:
            continue
        row = Row(patched.rank, name, f"{name}()", 0, "off")
        if not patched.adapter.own:
            text = f"candidate {found.path}: no module that was patched has or calls it"
            row.explain({Reason(Kind.CANDIDATE_UNUSED, text): 0})
        elif _has_function(found):  # the engine itself may call it, as it does `sampling`
            row.candidate = _candidate_label(found)
            row.explain({Reason(Kind.CANDIDATE_UNCALLED, "candidate: nothing has called it"): 0})
        else:
            text = f"candidate {found.path}: the model has no module of {', '.join(sorted(found.classes))}"
            row.explain({Reason(Kind.CANDIDATE_UNUSED, text): 0})
        made.append(row)
    return made


def absent_rows(adapter: Adapter, request: Request, model: Any, rows: list[Row], rank: int = 0) -> list[Row]:
    """Rows of what has no other: requested ops without a target, and modules that are not recognized."""
    made, present = [], {row.op for row in rows}
    for name in registry.op_names() if request.ops is None else dict.fromkeys(request.ops):
        told = [r["text"].partition(",")[0] for row in rows if row.op == name for r in row.reasons]
        found = adapter.unrecognized(name, model)
        reasons = {reason: n for reason, n in found.items() if reason.text.partition(",")[0] not in told}
        if request.ops is None and name not in present and adapter.first_call and model is not None:
            reasons |= _on_request(adapter, registry.get(name), model)
        if request.ops is not None and name not in present:
            reasons = {_unrecognized(reason): n for reason, n in reasons.items()} or {
                _why_absent(adapter, name): 0
            }
        if reasons:
            targets = registry.get(name).targets_for(adapter.host, adapter.version)
            row = Row(rank, name, targets[0].path.partition(":")[2] if targets else f"{name}()", 0, "off")
            row.explain(reasons)
            made.append(row)
    return made


def _unrecognized(reason: Reason) -> Reason:
    """The reason of modules that may compute an op which was requested and goes in nowhere."""
    return Reason(Kind.UNRECOGNIZED, reason.text) if reason.kind is Kind.OTHER_CLASS else reason


def _on_request(adapter: Adapter, spec: OpSpec, model: Any) -> dict[Reason, int]:
    """{reason: modules} of those that an op replaces, but not here without a request."""
    found: Counter[Reason] = Counter()
    for target in adapter.targets(spec, model):
        place, host_class = seam_interface.find(target.seam), seam_interface.host_class(target)
        if not place.live or target.default or host_class is None:
            continue
        modules = place.modules(adapter, model, spec.name, host_class)
        if (applies := getattr(registry.target_class(target), "applies", None)) is not None:
            modules = [module for module in modules if applies(module)]
        if modules:
            found[Reason(Kind.LEFT_TO_HOST, f"{target.name}, {target.note}")] += len(modules)
    return dict(found)


def _uncovered_rows(adapter: Adapter, request: Request, model: Any, rank: int) -> list[Row]:
    """One row for all modules that no op is for, in a report about a whole model."""
    reasons = adapter.uncovered(model) if request.ops is None else {}
    if not reasons:
        return []
    row = Row(rank, "-", "other modules", 0, "off")
    row.explain(reasons)
    return [row]


def _why_absent(adapter: Adapter, name: str) -> Reason:
    """Why a requested op has no place in this host or model."""
    targets = registry.get(name).targets_for(adapter.host, adapter.version)
    if adapter.own or any(seam_interface.find(target.seam).live for target in targets):
        return Reason(Kind.NO_SUCH_MODULE, "the model has no such module")
    inside = [op for op in registry.op_names() if name in registry.get(op).calls]
    inside = [op for op in inside if registry.get(op).targets_for(adapter.host, adapter.version)]
    if targets:
        note = next((target.note for target in targets if target.note), f"it is a {targets[0].seam} there")
        text = f"not in a live host: {note}"
    else:
        text = f"{adapter.host} {adapter.version} has no module or function that it replaces"
    if inside:
        text += f"; it runs inside {', '.join(inside)}"
    return Reason(Kind.NO_SEAM, text)


def summary(patched: Patched) -> str:
    """The log's few lines about a patch: what is patched, and what stays with the host for which reason."""
    adapter, rows = patched.adapter, patched.rows
    active = [row for row in rows if row.state == "active"]
    count = sum(row.modules for row in active)
    head = f"{adapter.host} {adapter.version}, rank {patched.rank}: "
    lines = [head + (f"{count} modules patched" if active else "everything was left to the host")]
    if active:
        lines.append(
            "  patched: " + ", ".join(f"{row.op} ({row.modules} {row.host_class})" for row in active)
        )
    for phrase in (Phrase.LEFT, Phrase.UNSUPPORTED):
        title, found = phrase.value, dict[str, dict[str, None]]()
        for row in rows:
            for reason in row.reasons:
                kind = Kind(reason["kind"])
                if kind not in _SILENT and kind.phrase is phrase:
                    found.setdefault(reason["text"], {})[row.op] = None
        for text, ops in list(found.items())[:3]:
            lines.append(f"  {title}: {', '.join(ops)}: {text}")
        if more := list(dict.fromkeys(op for ops in list(found.values())[3:] for op in ops)):
            lines.append(f"  {title}: {', '.join(more)}: other reasons, in the report")
    return "\n".join(lines)


_SILENT = (Kind.NO_SUCH_MODULE, Kind.CANDIDATE, Kind.CANDIDATE_UNCALLED, Kind.FUSED)


def _annotate(patched: Patched) -> None:
    """Fill in which candidates and providers run in the active rows."""
    wanted = Environment.read().provider
    functions = {name for name, found in patched.candidates.items() if _has_function(found)}
    for row in patched.rows:
        if row.state != "active":
            continue
        row.inside = sorted(registry.reached(row.op) & functions)
        op = registry.get(row.op).op
        if op is not None and row.op in wanted:
            op.order(_device(patched.model))  # raises ValueError for an unknown provider
            row.provider = wanted[row.op]
        if row.candidate and patched.adapter.own:
            row.explain({Reason(Kind.CANDIDATE, "candidate"): 0})


def _check(patched: Patched) -> None:
    """Raise PatchError if the patch differs from the request."""
    request, rows = patched.request, patched.rows
    problems = [row for row in rows if not all(kind.harmless for kind in row.kinds)]
    if request.strict and problems:
        raise PatchError("strict: " + "; ".join(f"{r.op} ({r.host_class}): {r.reason}" for r in problems))
    unused = [row for row in problems if Kind.CANDIDATE_UNUSED in row.kinds]
    if patched.adapter.own and unused and not any(row.candidate for row in rows):
        raise PatchError("; ".join(row.reason for row in unused))
    if patched.adapter.whole and (problem := nothing_patched(rows, request)) is not None:
        raise PatchError(problem)
