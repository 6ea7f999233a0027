"""MacroEval: one score of a set over all declared items, built so that no missing or failed item can raise it.

    score = S * C * coverage

    item        b = sqrt(T * L), at least 0.5; T and L are its speedups of throughput and latency; valid if c >= 0.9
    category    S_f = geometric mean of b, C_f = mean of c, V_f = valid / declared; an invalid item: b = 0.5, c = 0
    overall     S = geometric mean of S_f; C and coverage = means of C_f and V_f; over all declared categories

Intervals: bootstrap over the items of each category, so they show how much a figure depends on single items.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np


@dataclass(frozen=True)
class Item:
    """One declared measurement: a model (level 4) or an op (levels 1 to 3) with a workload in a host."""

    category: str
    model: str
    workload: str
    host: str
    ranks: int = 1
    level: int = 4


@dataclass(frozen=True)
class ItemOutcome:
    """Speedups of the set over the same host without it, and correctness in [0, 1]. Raises ValueError outside."""

    throughput: float
    latency: float
    correctness: float

    def __post_init__(self) -> None:
        for name in ("throughput", "latency"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: a speedup is a positive number, got {getattr(self, name)}")
        if not 0 <= self.correctness <= 1:
            raise ValueError(f"correctness lies in [0, 1], got {self.correctness}")


@dataclass(frozen=True)
class Rules:
    """The constants of the score."""

    floor: float | None = 0.5  # the least b, and b of an invalid item; None leaves invalid items out of S
    threshold: float = 0.9  # the least correctness of a valid item
    weight: float = 0.5  # of throughput in b; the rest is latency's
    keeps_invalid_c: bool = False  # whether an invalid item keeps its correctness in C instead of 0


DEFAULT = Rules()
PEER = Rules(floor=None, keeps_invalid_c=True)  # the published FastKernels' board of September 2026


@dataclass(frozen=True)
class Part:
    """Figures of a group of items. S is None if no item enters it; S_valid, of valid items alone, is never ranked."""

    declared: int
    valid: int
    S: float | None
    C: float
    coverage: float
    S_valid: float | None
    ci95: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def score(self) -> float:
        return (self.S or 0.0) * self.C * self.coverage


@dataclass(frozen=True)
class MacroEval:
    """The score of a set: over all categories, and for each value of an item's field, as in by['host']['vllm']."""

    overall: Part
    by: Mapping[str, Mapping[str, Part]]


def _geometric(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def _part(outcomes: Sequence[ItemOutcome | None], rules: Rules) -> Part:
    """The figures of one group. None is an item that was not run, failed, or in which no candidate ran."""
    there = [o for o in outcomes if o is not None]
    valid = [o for o in there if o.correctness >= rules.threshold]
    b = speeds = [o.throughput**rules.weight * o.latency ** (1 - rules.weight) for o in valid]
    if rules.floor is not None:  # a declared category without items counts like an invalid item
        b = [max(x, rules.floor) for x in b]
        speeds = b + [rules.floor] * max(len(outcomes) - len(valid), int(not outcomes))
    c = math.fsum(o.correctness for o in (there if rules.keeps_invalid_c else valid))
    n = max(len(outcomes), 1)
    return Part(len(outcomes), len(valid), _geometric(speeds), c / n, len(valid) / n, _geometric(b))


def _combined(groups: Sequence[Sequence[ItemOutcome | None]], rules: Rules) -> Part:
    parts = [_part(group, rules) for group in groups]
    declared, valid = sum(p.declared for p in parts), sum(p.valid for p in parts)
    C, coverage = (math.fsum(x) / len(parts) for x in zip(*((p.C, p.coverage) for p in parts), strict=True))
    S = _geometric([p.S for p in parts if p.S is not None])
    S_valid = _geometric([p.S_valid for p in parts if p.S_valid is not None])
    return Part(declared, valid, S, C, coverage, S_valid)


def _with_intervals(groups: Sequence[Sequence[ItemOutcome | None]], rules: Rules, draws: int) -> Part:
    whole = _combined(groups, rules)
    if not draws or all(len(group) < 2 for group in groups):  # nothing to draw from
        return whole
    rng = np.random.default_rng(0)
    picks = [(g, rng.integers(0, max(len(g), 1), (draws, len(g)))) for g in groups]
    drawn = [_combined([[g[i] for i in pick[n]] for g, pick in picks], rules) for n in range(draws)]
    values = {name: [getattr(d, name) or 0.0 for d in drawn] for name in ("score", "S", "C", "coverage")}
    return replace(whole, ci95={n: tuple(np.percentile(v, (2.5, 97.5)).tolist()) for n, v in values.items()})


def macro_eval(
    declared: Iterable[Item],
    outcomes: Mapping[Item, ItemOutcome],
    categories: Iterable[str] = (),
    rules: Rules = DEFAULT,
    draws: int = 1000,  # of the bootstrap; 0: no intervals
) -> MacroEval:
    """Return the score of a set over the declared items and categories, with those that have no item yet.

    Raises ValueError if nothing is declared, for an item declared twice, and for an outcome that was not declared.
    """
    items = sorted(declared, key=str)
    if not (names := sorted({*categories, *(i.category for i in items)})):
        raise ValueError("MacroEval needs a declared item or category, got none")
    if twice := sorted({str(i) for i in items if items.count(i) > 1}):
        raise ValueError(f"declared twice: {', '.join(twice)}")
    if unknown := outcomes.keys() - set(items):
        raise ValueError(f"measured but not declared: {', '.join(sorted(map(str, unknown)))}")
    groups: dict[str, dict[str, list[ItemOutcome | None]]] = {f.name: {} for f in fields(Item)}
    groups["category"] = {name: [] for name in names}
    for item in items:
        for name, group in groups.items():
            group.setdefault(str(getattr(item, name)), []).append(outcomes.get(item))
    by = {n: {k: _with_intervals([g], rules, draws) for k, g in of.items()} for n, of in groups.items()}
    return MacroEval(_with_intervals(list(groups["category"].values()), rules, draws), by)
