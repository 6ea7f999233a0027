"""Predicted savings of measured kernels in a model's step, from the nearest measurement of each call.

The calls come from the cost model. A measurement is near if op, dtype and kind are equal, layer sizes differ by at most
WIDEST and tokens by at most MOST; if a tuned table picks the kernel, the layer must be the same and tokens nearly
equal. Times are not scaled, and calls without a near measurement are listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fastkernels.core import registry
from fk_bench.e2e.model_configs import load_config
from fk_bench.explain.cost_model import Call, Step, step
from fk_bench.kernels.judge.clock import roofline
from fk_bench.tables.measurements import Point, distance, shape

MODELS = ("llama-3.1-8b", "qwen3-8b", "mixtral-8x7b")
BATCHES = (1, 8, 32, 256)
MOST, WIDEST = 4.0, 1.5  # highest ratio of tokens, and of layer widths
MOST_BY_TABLE = 1.5


@dataclass(frozen=True)
class Line:
    """A call of a step with its measurement, which is None if there is no near one."""

    call: Call
    point: Point | None

    @property
    def production_ms(self) -> float:
        return self.call.count * self.point.production_us / 1e3 if self.point is not None else 0.0

    @property
    def saved_ms(self) -> float:
        point = self.point
        return 0.0 if point is None else self.call.count * (point.production_us - point.ours_us) / 1e3


def nearest(call: Call, known: Sequence[Point]) -> Point | None:
    """The measurement nearest to a call, or None."""
    best, least = None, math.inf
    if call.case is None:
        return None
    asked = shape(call.op, call.case.dims)
    by_table = getattr(registry.get(call.op).op, "key", None) is not None
    limits = (MOST_BY_TABLE, 1.0) if by_table else (MOST, WIDEST)
    for point in known:
        if (point.op, point.dtype) == (call.op, call.dtype):
            far = distance(asked, point.shape, *limits)
            if far is not None and far < least - 1e-9:
                best, least = point, far
    return best


def lines(model: str, batch: int, context: int, known: Sequence[Point]) -> list[Line]:
    """The calls of a decode step of a public model, grouped by size, each with its nearest measurement."""
    calls: dict[tuple[str, str], Call] = {}
    for call in _step(model, batch, context).calls:
        key = call.op, repr(shape(call.op, call.case.dims)) if call.case is not None else call.label
        if (before := calls.get(key)) is not None:
            labels = dict.fromkeys((*before.label.split(", "), call.label))
            call = replace(before, count=before.count + call.count, label=", ".join(labels))
        calls[key] = call
    return [Line(call, nearest(call, known)) for call in calls.values()]


@cache
def _step(model: str, batch: int, context: int) -> Step:
    return step(*load_config(model), "decode", batch, context)


def covered(found: Sequence[Line], gpu: roofline.Peaks | None) -> float | None:
    """The share of the step's floor in its measured calls."""
    floors = [(x, x.call.floor_us(gpu)) for x in found]
    if any(us is None for _, us in floors):
        return None
    measured = sum(x.call.count * (us or 0.0) for x, us in floors if x.point is not None)
    return measured / sum(x.call.count * (us or 0.0) for x, us in floors)


def speedup(found: Iterable[Line]) -> float | None:
    """Geometric mean of the speedups, weighted by each call's share of the step's time with production kernels."""
    measured = [(x.production_ms, math.log(x.point.speedup)) for x in found if x.point is not None]
    whole = sum(w for w, _ in measured)
    return math.exp(sum(w * s for w, s in measured) / whole) if whole else None
