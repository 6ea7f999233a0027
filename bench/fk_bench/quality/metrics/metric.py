"""The base of metrics, and all of them by name: every other file of this folder has one class."""

from __future__ import annotations

import importlib
import inspect
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

OUTPUTS = "outputs"  # the one file without a metric, next to this one


@dataclass(frozen=True)
class Value:
    """One metric of one run against the reference. The discrepancy is in [0, 1], 0 for equal outputs."""

    metric: str
    value: float
    unit: str
    discrepancy: float

    def __post_init__(self) -> None:
        if not 0 <= self.discrepancy <= 1 and not math.isnan(self.discrepancy):
            raise ValueError(f"{self.metric}: a discrepancy lies in [0, 1], got {self.discrepancy}")


class Metric:
    """A measure of outputs against the reference's. `direction` is that of better values: 'higher' or 'lower'."""

    name: ClassVar[str]
    formula: ClassVar[str]
    unit: ClassVar[str]
    direction: ClassVar[str]
    families: ClassVar[tuple[str, ...]]

    def value(self, output: Any, reference: Any) -> float:
        raise NotImplementedError

    def discrepancy(self, value: float, output: Any, reference: Any) -> float:
        """By default the distance from the value that the reference itself has; 1 at most after `measure`."""
        return abs(self.value(reference, reference) - value)

    def measure(self, output: Any, reference: Any) -> Value:
        """NaN in an output gives NaN, and so c = 0. Raises ValueError for outputs whose shapes differ."""
        if (mine := output.sizes()) != (wanted := reference.sizes()):
            raise ValueError(f"{self.name}: the outputs have sizes {mine}, the reference's {wanted}")
        value = math.nan if output.has_nan() else self.value(output, reference)
        discrepancy = self.discrepancy(value, output, reference) if math.isfinite(value) else math.nan
        return Value(
            self.name, value, self.unit, discrepancy if math.isnan(discrepancy) else min(discrepancy, 1.0)
        )


def angle(cosine: float) -> float:
    """The angle of a cosine, 1 for a right angle or more: unlike 1 - cosine it is linear in small changes."""
    return min(math.acos(max(-1.0, min(1.0, cosine))) / (math.pi / 2), 1.0)


@cache
def metrics() -> dict[str, Metric]:
    """All metrics by name."""
    found: dict[str, Metric] = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem in ("__init__", Path(__file__).stem, OUTPUTS):
            continue
        module = importlib.import_module(f"fk_bench.quality.metrics.{file.stem}")
        kinds = [
            c
            for _, c in inspect.getmembers(module, inspect.isclass)
            if issubclass(c, Metric) and c is not Metric
        ]
        found |= {kind.name: kind() for kind in kinds}
    return found


def of_family(family: str) -> list[Metric]:
    return [metric for metric in metrics().values() if family in metric.families]
