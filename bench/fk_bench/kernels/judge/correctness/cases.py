"""The calls that an op is judged on: captured from real runs, the op's own cases, unseen shapes, extreme values."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fastkernels.core.spec import Case, OpSpec
from fk_bench.kernels.judge.correctness import extremes
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.slots import scalable

SOURCES = ("captured", "random", "held-out", "extreme")
CPU_BYTES, CPU_FLOPS = 1 << 20, 5e7  # milliseconds on a CPU; larger cases need a GPU
# Larger ones up to here can be checked, but not timed: a second or two
CHECKED_BYTES, CHECKED_FLOPS, LARGE = 40 << 20, 5e8, 1  # of LARGE secret cases of an op
CPU_ARGUMENTS = 16 << 20  # bytes of a call's arguments, which the judge makes again for every batch
HELD_OUT = 4
LEAST_BYTES = 64  # of an extreme case: in one or two values none stands out
ATTEMPTS = 8  # at cases to which a kind of extreme case applies


@dataclass(frozen=True)
class Trial:
    """One case to be judged.

    make    make(device, generator) -> arguments with values drawn from that generator
    edit    changes the arguments in place (extreme values)
    hard    {name: such a change}, of which some are also tried on a timed case
    nonfinite  kinds in `hard`, or this case itself, with NaN or infinite values
    large   too large to be timed on a CPU
    recipe  of the values of a slot, which are made again; see Slots
    timed   False for extreme and large cases, which are only checked
    """

    source: str
    case: Case
    make: Callable[[str, torch.Generator], list[Any]]
    edit: Callable[[list[Any]], None] | None = None
    hard: Mapping[str, Callable[[list[Any]], None]] = field(default_factory=dict)
    nonfinite: frozenset[str] = frozenset()
    large: bool = False
    recipe: Mapping[str, Any] | None = None

    @property
    def rolls(self) -> bool:
        """Whether the values of a call may be moved."""
        return self.timed if self.recipe is None else bool(self.recipe["rolls"])

    @property
    def timed(self) -> bool:
        return self.source != "extreme" and not self.large

    @property
    def is_nonfinite(self) -> bool:
        """Whether NaN and infinity count as the same in this case."""
        return self.case.name.partition(":")[2] in self.nonfinite

    def gpu_only(self, spec: OpSpec) -> str | None:
        """Why it does not run on a CPU, or None."""
        size, work = spec.bytes_moved(self.case), spec.flops(self.case)
        most, most_work = (CHECKED_BYTES, CHECKED_FLOPS) if self.large else (CPU_BYTES, CPU_FLOPS)
        if size > most or work > most_work:
            return (
                f"GPU only: {size / 1e6:.2f} MB and {work / 1e6:.1f} MFLOP per call, "
                f"more than {most / 1e6:.2f} MB or {most_work / 1e6:.0f} MFLOP; not run"
            )
        if (size := self._argument_bytes()) > (CHECKED_BYTES if self.large else CPU_ARGUMENTS):
            return f"GPU only: {size / 1e6:.0f} MB of arguments; not run"
        return None

    def _argument_bytes(self) -> int:
        """Bytes of the arguments, which may exceed what a call moves; 0 if unknown without making them."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return sum(t.nbytes for t in layout.tensors(self.make("cpu", torch.Generator())))
        except Exception:  # inputs that depend on values of other inputs; no such op has a large table
            return 0


def trials(
    spec: OpSpec,
    sources: tuple[str, ...],
    device: str,
    names: tuple[str, ...] = (),
    captures: Path | None = None,
    task: tuple[Case, ...] = (),
    most: int = 0,
) -> list[Trial]:
    """The cases of an op from these sources, with these names if any are given. captures: None for the shipped ones.

    task: only these cases, with values that the op draws. most: of each source, 0 for all.
    """
    if task:
        return [Trial("task", c, maker(spec, c)) for c in task if not names or c.name in names]
    found: list[Trial] = []
    hard = _values(spec) if "extreme" in sources else {}
    nonfinite = frozenset(k.name for k in extremes.kinds(spec) if k.nonfinite)
    if "captured" in sources:
        found += _captured(spec, captures, hard, nonfinite)
        found = _first(found, most, device, spec)
    own = [Trial("random", c, maker(spec, c), hard=hard, nonfinite=nonfinite) for c in spec.cases]
    if "random" in sources:
        found += _first(own, most, device, spec)
    here = [t for t in own if device == "cuda" or t.gpu_only(spec) is None]
    if "held-out" in sources:
        found += _held_out(spec, [t.case for t in here])[: most or None]
    if "extreme" in sources:
        extreme = _extremes(spec, here, bool(names))
        found += secrets.SystemRandom().sample(extreme, min(most or len(extreme), len(extreme)))
    chosen = [t for t in found if not names or t.case.name in names]
    return chosen if device == "cuda" else _with_large(spec, chosen)


def _first(found: list[Trial], most: int, device: str, spec: OpSpec) -> list[Trial]:
    """The first `most` that run here, those of models first; all for 0."""
    if not most:
        return found
    here = [t for t in found if device == "cuda" or t.gpu_only(spec) is None]
    return sorted(here or found, key=lambda t: "model" not in t.case.tags)[:most]


def _with_large(spec: OpSpec, found: list[Trial]) -> list[Trial]:
    """CPU: check some cases that are too large to be timed, because a candidate may be right for small ones only."""
    large = [replace(t, large=True, hard={}) for t in found if t.gpu_only(spec) is not None]
    fitting = [t.case.name for t in large if t.gpu_only(spec) is None]
    picked = secrets.SystemRandom().sample(fitting, min(LARGE, len(fitting)))
    by_name = {t.case.name: t for t in large if t.case.name in picked}
    return [by_name.get(t.case.name, t) for t in found]


def case_names(specs: Sequence[OpSpec], options: Any) -> dict[str, None]:
    """Names of all cases of these ops that do not change from run to run, for `Options.names`."""
    found: dict[str, None] = {}
    for spec in specs:
        if options.task:
            found |= dict.fromkeys(c.name for c in options.task)
            continue
        if "random" in options.cases:
            found |= dict.fromkeys(c.name for c in spec.cases)
        if "captured" in options.cases:
            found |= dict.fromkeys(t.case.name for t in _captured(spec, options.captures, {}))
        if "extreme" in options.cases:
            dtypes = dict.fromkeys(c.dtype for c in spec.cases)
            kinds = [*changes(spec), *(k.name for k in extremes.kinds(spec))]
            found |= dict.fromkeys(f"{dtype}:{kind}" for dtype in dtypes for kind in kinds)
    return found


def maker(spec: OpSpec, case: Case) -> Callable[[str, torch.Generator], list[Any]]:
    """A maker of the arguments of a case, with values that the op draws."""
    return lambda device, generator: spec.inputs(case, device, generator)


def _captured(
    spec: OpSpec, folder: Path | None, hard: Mapping[str, Any], nonfinite: frozenset[str] = frozenset()
) -> list[Trial]:
    from fk_bench.capture.replay import captured_cases

    return [
        Trial("captured", c.case, c.make_args, hard=hard, nonfinite=nonfinite)
        for c in captured_cases(spec.name, folder)
    ]


def changes(spec: OpSpec) -> dict[str, Callable[[list[Any]], None]]:
    """{name: change} of all extreme values of the op."""
    kinds = {**(_VALUES if spec.activations else {}), **spec.extremes}
    return {
        name: _on_activations(spec, change) if name in _VALUES and name not in spec.extremes else change
        for name, change in kinds.items()
    }


def _values(spec: OpSpec) -> dict[str, Callable[[list[Any]], None]]:
    """{name: change} of the values that can also be tried on a timed case."""
    return {
        **changes(spec),
        **{k.name: k.edit for k in extremes.kinds(spec) if k.values and k.edit is not None},
    }


def _held_out(spec: OpSpec, cases: list[Case]) -> list[Trial]:
    if spec.vary is None or not cases:
        return []
    rng = random.Random(secrets.randbits(128))
    models = [c for c in cases if "model" in c.tags]
    chosen = [*rng.sample(models, min(HELD_OUT // 2, len(models)))]
    others = [c for c in cases if c not in chosen]
    chosen += rng.sample(others, min(HELD_OUT - len(chosen), len(others)))
    varied = [spec.vary(c, rng) for c in chosen]
    return [Trial("held-out", c, maker(spec, c)) for c in varied]


def _extremes(spec: OpSpec, here: list[Trial], every: bool) -> list[Trial]:
    """Every kind of extreme value for every dtype, on a case drawn anew, with another shape where the op has any; and
    every kind of its declaration (see extremes) for a dtype drawn anew, or for `every` one.
    """
    rng = random.Random(secrets.randbits(128))
    found = []
    for dtype in dict.fromkeys(t.case.dtype for t in here):
        mine = sorted((t.case for t in here if t.case.dtype == dtype), key=spec.bytes_moved)
        usable = [c for c in mine if spec.bytes_moved(c) > LEAST_BYTES] or mine
        small = usable[: max(1, (len(usable) + 1) // 2)]  # checked by the oracle only, so small ones suffice
        for name, edit in changes(spec).items():
            base = rng.choice(small)
            drawn = base if spec.vary is None else spec.vary(base, rng)
            case = Case(f"{dtype}:{name}", drawn.dims, dtype, 0.0, base.tags)
            found.append(Trial("extreme", case, maker(spec, drawn), edit))
    by_dtype: dict[str, list[Case]] = {}
    for t in here:
        by_dtype.setdefault(t.case.dtype, []).append(t.case)
    for kind in extremes.kinds(spec):
        for dtype in rng.sample(list(by_dtype), len(by_dtype)):
            made = _of_kind(spec, kind, by_dtype[dtype], rng)
            found += made
            if made and not every:
                break
    return found


def _of_kind(spec: OpSpec, kind: extremes.Kind, cases: list[Case], rng: random.Random) -> list[Trial]:
    """A trial of this kind on one of the cases of a dtype, if it applies to one of those that are tried."""
    usable = [c for c in cases if spec.bytes_moved(c) > LEAST_BYTES] or cases
    for base in rng.sample(usable, min(ATTEMPTS, len(usable))):
        if (made := extremes.apply(kind, spec, base, rng)) is not None:
            case = replace(made, name=f"{made.dtype}:{kind.name}")
            nonfinite = frozenset({kind.name} if kind.nonfinite else ())
            return [Trial("extreme", case, maker(spec, made), kind.edit, nonfinite=nonfinite)]
    return []


def _on_activations(spec: OpSpec, change: Callable[[torch.Tensor], None]) -> Callable[[list[Any]], None]:
    def edit(args: list[Any]) -> None:
        for i in spec.activations:
            t = args[i] if i < len(args) else None
            if isinstance(t, torch.Tensor) and scalable(t) and t.numel():
                change(t)

    return edit


def _large(t: torch.Tensor) -> None:
    t.mul_(64)


def _tiny(t: torch.Tensor) -> None:
    t.mul_(2.0**-12)


def _equal(t: torch.Tensor) -> None:
    t.fill_(0.75)


def _zero(t: torch.Tensor) -> None:
    t.zero_()


def _outlier(t: torch.Tensor) -> None:
    extremes.put_signed(t, 1000.0)


_VALUES: dict[str, Callable[[Any], None]] = {
    "large": _large, "tiny": _tiny, "equal": _equal, "zero": _zero, "outlier": _outlier,
}  # fmt: skip
