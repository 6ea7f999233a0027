"""The audit of one architecture: its modules, matched with ops, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from fk_integrations.transformers import architectures, switches
from fk_integrations.transformers.matching import Kind, Match, match

from fastkernels.models.common.descriptions import registry


class Coverage(str, Enum):
    """See docs/coverage.md. FAILED: the audit could not build or read the architecture; it counts as not covered."""

    RUNS = "runs"
    COMPOSABLE = "composable"
    PARTIAL = "partial"
    NEW_PRIMITIVE = "new primitive"
    EXTERNAL = "external"
    FAILED = "failed"


STRICT = (Coverage.RUNS, Coverage.COMPOSABLE)
LOOSE = (*STRICT, Coverage.PARTIAL)


@dataclass(frozen=True)
class Row:
    """One architecture.

    file       "folder/modeling_name.py"; model_type and model: the class that stands for it
    modules    classes of modules; matched: how many of them by {"class", "signature", "probe"}, if all of them count
    ops        ops that its modules equal
    missing    {primitive: classes} that no op computes
    differs    {difference: classes} that are matched by class only, or that only a switched config has
    error      why it is external or failed
    served     classes of the file that our engine serves whole; the file `runs` if `model` is one of them
    """

    file: str
    verdict: Coverage
    model_type: str = ""
    model: str = ""
    modules: int = 0
    strict: int = 0
    ops: tuple[str, ...] = ()
    missing: dict[str, list[str]] = field(default_factory=dict)
    differs: dict[str, list[str]] = field(default_factory=dict)
    error: str = ""
    served: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "verdict": self.verdict.value,
            "ops": list(self.ops),
            "served": list(self.served),
        }

    @staticmethod
    def from_dict(row: dict[str, Any]) -> Row:
        return Row(
            **{
                **row,
                "verdict": Coverage(row["verdict"]),
                "ops": tuple(row["ops"]),
                "served": tuple(row["served"]),
            }
        )


def audit(file: str) -> Row:
    """The row of a modeling file of the installed transformers."""
    try:
        known = architectures.candidates(file)
        served = _served(architectures.classes(file))
    except architectures.External as error:
        return Row(file, Coverage.EXTERNAL, error=str(error))
    cls: Any = known[0]
    runs = cls.__name__ in served
    try:
        cls, model = architectures.representative(file)
    except architectures.External as error:
        return Row(file, Coverage.RUNS if runs else Coverage.EXTERNAL, model=cls.__name__, error=str(error))
    except Exception as error:  # of a host's default config
        failed = Coverage.RUNS if runs else Coverage.FAILED
        return Row(file, failed, model=cls.__name__, error=f"{type(error).__name__}: {error}"[:200])
    runs = cls.__name__ in served
    model_type = getattr(cls.config_class, "model_type", "") or file.partition("/")[0]
    found = {(type(module).__name__, match(module)) for module in model.modules()}
    for variant in architectures.variants(model):
        found |= {(type(module).__name__, match(module)) for module in variant.modules()}
    row = judge(file, model_type, cls.__name__, runs, found)
    if row.verdict is Coverage.COMPOSABLE:
        row = needing(row, switches.switched(model))
    return replace(row, served=served)


def needing(row: Row, switched: Iterable[tuple[str, str, Match]]) -> Row:
    """The row of a composable file: partial if a module of a switched config, (class, switches, match), differs."""
    differs: dict[str, list[str]] = {}
    for cls, told, m in switched:
        if not m.strict:
            differs.setdefault(m.needs or f"{m.op}: not shown to be equal", []).append(f"{cls} with {told}")
    return replace(row, verdict=Coverage.PARTIAL, differs=differs) if differs else row


def _served(classes: Iterable[str]) -> tuple[str, ...]:
    """The classes that the engine serves whole: not those of which it serves the text model only."""
    whole = {name for model in registry.models().values() for name in model.arch.names}
    return tuple(sorted(whole & set(classes)))


def judge(file: str, model_type: str, model: str, runs: bool, found: set[tuple[str, Match]]) -> Row:
    """The row of an architecture whose modules, as (class, match), are known."""
    missing: dict[str, list[str]] = {}
    differs: dict[str, list[str]] = {}
    for cls, m in sorted(found, key=lambda pair: pair[0]):
        if m.kind is Kind.MISSING:
            missing.setdefault(m.needs, []).append(cls)
        elif not m.strict:
            differs.setdefault(m.needs or f"{m.op}: not shown to be equal", []).append(cls)
    if runs:
        verdict = Coverage.RUNS
    elif missing:
        verdict = Coverage.NEW_PRIMITIVE
    else:
        verdict = Coverage.PARTIAL if differs else Coverage.COMPOSABLE
    ops = sorted({m.op for _, m in found if m.strict and m.kind is Kind.OP})
    strict = sum(m.strict for _, m in found)
    return Row(file, verdict, model_type, model, len(found), strict, tuple(ops), missing, differs)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Counts of verdicts, the two percentages, and how many architectures each missing primitive keeps from each."""
    counts = Counter(row.verdict for row in rows)
    total = len(rows) or 1
    primitives = Counter(name for row in rows if row.verdict not in STRICT for name in row.missing)
    differences = Counter(name for row in rows if row.verdict not in STRICT for name in row.differs)
    alone = Counter(
        next(iter(row.missing | row.differs))
        for row in rows
        if row.verdict not in STRICT and len(row.missing | row.differs) == 1
    )
    return {
        "architectures": len(rows),
        "verdicts": {verdict.value: counts[verdict] for verdict in Coverage},
        "strict": {"count": sum(counts[v] for v in STRICT), "percent": _percent(STRICT, counts, total)},
        "loose": {"count": sum(counts[v] for v in LOOSE), "percent": _percent(LOOSE, counts, total)},
        "missing": [_needed(name, n, alone) for name, n in primitives.most_common()],
        "differs": [_needed(name, n, alone) for name, n in differences.most_common()],
    }


def _percent(verdicts: tuple[Coverage, ...], counts: Counter[Coverage], total: int) -> float:
    return round(100 * sum(counts[v] for v in verdicts) / total, 1)


def _needed(name: str, count: int, alone: Counter[str]) -> dict[str, Any]:
    return {"name": name, "architectures": count, "nothing_else": alone[name]}
