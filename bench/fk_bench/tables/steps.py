"""Tables of whole decode steps: what measured kernels predict for a model, and what patched servers realized."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from fastkernels.core import registry
from fk_bench.core.rows import Row
from fk_bench.explain.tables import Table, millis
from fk_bench.kernels.judge.clock import roofline
from fk_bench.serving import summary
from fk_bench.tables import savings
from fk_bench.tables.measurements import points
from fk_bench.tables.origin import Files, flat, origin
from fk_bench.tables.servers import baselines, paired, runs

USED = ("kernels", "explain", "skinny_linear", "decode_attention", "serve-compare")
ENOUGH = 0.9  # share of a step's floor that must be measured for its speedup to count in the mean
CONTEXT = 1024  # tokens of a sequence where no server's rows give them


@dataclass(frozen=True)
class Served:
    """A host and the same host patched at one concurrency: medians between tokens in ms, and the ops that ran."""

    model: str
    host: str
    requests: int
    context: int
    stock_ms: float
    patched_ms: float
    ops: frozenset[str]

    @property
    def saved_ms(self) -> float:
        return self.stock_ms - self.patched_ms


def served(files: Files) -> list[Served]:
    """Return every HOST+fk with its HOST, for models of `savings.MODELS`, at the run's own lengths."""
    made = []
    for run in runs(files):
        cells = [c for c in summary.cells(run) if c.level.own_lengths]
        bases, case = baselines(run), summary.run_case(run)
        model = next((m for m in savings.MODELS if str(run[0].subject.model).lower().startswith(m)), None)
        ran = {str(r.subject.lane): r.case.get("patched_ops") or {} for r in run if r.kind == "lane"}
        context = int(case.get("input_len", CONTEXT)) + int(case.get("output_len", 0)) // 2
        for cell in cells:
            host = cell.lane.removesuffix("+fk")
            base = next((c for c in cells if c.lane == bases.get(cell.lane) and c.level == cell.level), None)
            if model is None or base is None or base.lane != host or cell.level.kind != "concurrency":
                continue
            fast, stock = paired(cell, base, "itl_ms_p50")
            if fast:
                ops = frozenset(
                    name for op in ran.get(cell.lane, {}) for name in (op, *registry.get(op).calls)
                )
                made.append(
                    Served(model, host, int(cell.level.value), context, fmean(stock), fmean(fast), ops)
                )
    return sorted(made, key=lambda s: (s.model, s.host, s.requests))


def steps(files: Files) -> Iterator[Table]:
    """The predicted speedup of a decode step of each model, by batch."""
    known, pairs = points(files), served(files)
    if not known:
        return
    context, used = pairs[0].context if pairs else CONTEXT, [r for r in flat(files) if r.command in USED]
    gpu, cells, means = _peaks(used), [], []
    for model in savings.MODELS:
        for batch in savings.BATCHES:
            lines = savings.lines(model, batch, context, known)
            mean, share = savings.speedup(lines), savings.covered(lines, gpu)
            if mean is not None and (share is None or share >= ENOUGH):
                means.append(mean)
            measured = "" if share is None else f"{100 * share:.0f}%"
            production = millis(sum(x.production_ms for x in lines))
            saved = _signed(sum(x.saved_ms for x in lines))
            cells.append(
                [model, str(batch), measured, production, saved, "" if mean is None else f"{mean:.3f}"]
            )
    overall = f"{math.exp(fmean(map(math.log, means))):.3f}" if means else "unknown"
    title = (
        f"Kernels of a decode step at {context} tokens of context, each timed alone: production's fastest and ours. "
        f"The speedup is the mean of the ops' speedups, weighted by production's time; over all steps {overall} "
        f"({origin(used, files)}):"
    )
    yield title, ["model", "batch", "measured", "production ms", "saved ms", "speedup"], cells


def realized(files: Files) -> Iterator[Table]:
    """The time per step that patched servers saved, and the prediction from their ops' measurements."""
    known, pairs = points(files), served(files)
    if not known or not pairs:
        return
    cells, whole, saved = [], 0.0, 0.0
    for pair in pairs:
        lines = savings.lines(pair.model, pair.requests, pair.context, known)
        promised = sum(x.saved_ms for x in lines if x.call.op in pair.ops)
        whole, saved = whole + promised, saved + pair.saved_ms
        times = [f"{pair.stock_ms:.2f}", f"{pair.patched_ms:.2f}"]
        missing = _missing(lines, pair.ops)
        cells.append([pair.host, str(pair.requests), *times, *_shares(promised, pair.saved_ms), missing])
    cells.append(["all", "", "", "", *_shares(whole, saved), ""])
    used = [r for r in flat(files) if r.command in USED]
    title = (
        f"Decode steps of {', '.join(dict.fromkeys(p.model for p in pairs))} in ms: median time between tokens, the "
        f"saving predicted from single kernels, and the saving in the server ({origin(used, files)}):"
    )
    columns = ["host", "requests", "ITL", "ITL patched", "predicted", "realized", "realized / predicted"]
    yield title, [*columns, "ops not measured"], cells


def _shares(promised: float, saved: float) -> list[str]:
    share = f"{round(saved / promised, 2) + 0.0:.2f}" if promised > 0 else ""
    return [_signed(promised), _signed(saved), share]


def _missing(lines: Sequence[savings.Line], ops: frozenset[str]) -> str:
    return (
        ", ".join(dict.fromkeys(x.call.op for x in lines if x.call.op in ops and x.point is None)) or "none"
    )


def _peaks(used: Sequence[Row]) -> roofline.Peaks | None:
    return next((p for r in used if (p := roofline.peaks(r.machine.gpu)) is not None), None)


def _signed(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 0.0005 else "0.000"
