"""Kernels that pay: what each op promises a step of three models, and what patched servers realized of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from fastkernels.core import registry
from fk_bench.core.rows import Row
from fk_bench.explain import savings as pays
from fk_bench.explain.measurements import points
from fk_bench.explain.savings import Line
from fk_bench.explain.tables import Table, millis, number
from fk_bench.kernels.judge.clock import roofline
from fk_bench.serving import summary
from fk_bench.tables.measured import Files, flat, origin, paired

USED = ("kernels", "explain", "skinny_linear", "decode_attention", "serve-compare")
ENOUGH = 0.9  # of a step's floor must have been measured for its mean to count among others
CONTEXT = 1024  # where no server says how long its sequences are


@dataclass(frozen=True)
class Served:
    """A host and the same host patched, at one number of requests: medians between tokens, ms, and what took part."""

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
    """Every HOST beside HOST+fk in rows of serve-compare, of a model of pays.MODELS, by the rounds that both have;
    at the run's own lengths, which the context is of."""
    pairs = []
    for found in files.values():
        mine = [r for r in found if r.command == "serve-compare"]
        made = [c for c in summary.cells(mine) if c.level.own_lengths]
        model = next(
            (m for r in mine[:1] for m in pays.MODELS if str(r.subject.model).lower().startswith(m)), None
        )
        ran = {str(r.subject.lane): r.case.get("patched_ops") or {} for r in mine if r.kind == "lane"}
        case = summary.run_case(mine)
        context = int(case.get("input_len", CONTEXT)) + int(case.get("output_len", 0)) // 2
        for cell in made:
            host = cell.lane.removesuffix("+fk")
            base = next((c for c in made if c.lane == host != cell.lane and c.level == cell.level), None)
            fast, stock = paired(cell, base, "itl_ms_p50") if base is not None else ([], [])
            if model is not None and fast and cell.level.kind == "concurrency":
                ops = frozenset(
                    name for op in ran.get(cell.lane, {}) for name in (op, *registry.get(op).calls)
                )
                pairs.append(
                    Served(model, host, int(cell.level.value), context, fmean(stock), fmean(fast), ops)
                )
    return sorted(pairs, key=lambda s: (s.model, s.host, s.requests))


def _context(pairs: Sequence[Served]) -> int:
    return pairs[0].context if pairs else CONTEXT


def _put_in(pairs: Sequence[Served]) -> frozenset[str]:
    """The ops that took part in a patched server, and those that they call."""
    return frozenset(op for s in pairs for op in s.ops)


def by_op(files: Files) -> Iterator[Table]:
    """For each model a line a call: at each batch production's time over ours, and the case that says so."""
    known, pairs = points(files), served(files)
    if not known:
        return
    context, first = _context(pairs), True
    used = [r for r in flat(files) if r.command in USED]
    for model in pays.MODELS:
        at = {batch: pays.lines(model, batch, context, known) for batch in pays.BATCHES}
        cells = []
        for line in at[pays.BATCHES[0]]:
            same = (next((x for x in found if _name(x) == _name(line)), None) for found in at.values())
            cells.append([_name(line), str(line.call.count), *map(_times, same)])
        how = (
            f" ({origin(used, files)}): us of the fastest of production / us of ours in the nearest case that was "
            f"measured, which is named. A step's calls are the cost model's, at a context of {context}"
        )
        columns = ["op", "calls", *(f"batch {batch}" for batch in pays.BATCHES)]
        yield (
            f"{model}, decode{how if first else ''}:",
            columns,
            [*cells, *_sums(model, at, pairs, _peaks(used))],
        )
        first = False


def _name(line: Line) -> str:
    return f"{line.call.op} ({line.call.label})"


def _times(line: Line | None) -> str:
    p = line.point if line is not None else None
    if p is None:
        return "no row"
    return f"{number(p.production_us)} {p.production} / {number(p.ours_us)} = {p.speedup:.2f} ({p.case})"


def _sums(
    model: str, at: dict[int, list[Line]], pairs: Sequence[Served], gpu: roofline.Peaks | None
) -> list[list[str]]:  # fmt: skip
    found, put_in = list(at.values()), _put_in(pairs)
    means = [pays.speedup(lines) for lines in found]
    stock = [next((s.stock_ms for s in pairs if (s.model, s.requests) == (model, b)), None) for b in at]
    return [
        ["production's ms of these", "", *(millis(sum(x.production_ms for x in lines)) for lines in found)],
        ["a served step of the host, ms", "", *map(millis, stock)],
        ["share of the step's floor that was measured", "", *(_percent(pays.covered(lines, gpu)) for lines in found)],
        ["**speed-up**: geometric mean, weighted by production's ms", "",
         *("" if m is None else f"**{m:.3f}**" for m in means)],
        ["saved ms, all of these", "", *(_signed(sum(x.saved_ms for x in lines)) for lines in found)],
        ["saved ms, ops that patched servers ran", "",
         *(_signed(sum(x.saved_ms for x in lines if x.call.op in put_in)) for lines in found)],
        ["calls without a row", "", *(_missing(lines) for lines in found)],
    ]  # fmt: skip


def _peaks(used: Sequence[Row]) -> roofline.Peaks | None:
    return next((p for r in used if (p := roofline.peaks(r.machine.gpu)) is not None), None)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _missing(lines: Sequence[Line]) -> str:
    names = list(dict.fromkeys(x.call.op for x in lines if x.point is None))
    return ("all" if all(x.point is None for x in lines) else ", ".join(names)) or "none"


def predicted(files: Files) -> Iterator[Table]:
    """A line for each model and batch: what each op promises, in all, and what the patched host realized."""
    known, pairs = points(files), served(files)
    if not known:
        return
    context, put_in = _context(pairs), _put_in(pairs)
    have = {(s.model, s.requests) for s in pairs}
    asked: list[tuple[str, int, Served | None]] = [(s.model, s.requests, s) for s in pairs]
    asked += [(m, b, None) for m in pays.MODELS for b in pays.BATCHES if (m, b) not in have]
    asked.sort(key=lambda a: (pays.MODELS.index(a[0]), a[2].host if a[2] is not None else "~", a[1]))
    made = [(pair, model, batch, pays.lines(model, batch, context, known)) for model, batch, pair in asked]
    ops = list(dict.fromkeys(x.call.op for *_, lines in made for x in lines if x.call.op in put_in))
    used = [r for r in flat(files) if r.command in USED]
    gpu, means = _peaks(used), {}
    cells, promised, realized = [], 0.0, 0.0
    for pair, model, batch, lines in made:
        ran = pair.ops if pair is not None else put_in
        whole = sum(x.saved_ms for x in lines if x.call.op in ran)
        each = [_op_ms(op, lines) if op in ran else "" for op in ops]
        mean, share, last = pays.speedup(lines), pays.covered(lines, gpu), ["", "", ""]
        if mean is not None and batch in pays.BATCHES and (share is None or share >= ENOUGH):
            means[model, batch] = mean
        if pair is not None:
            promised, realized = promised + whole, realized + pair.saved_ms
            last = [pair.host, *_realized(whole, pair.saved_ms)]
        start = [model, str(batch), _percent(share), "" if mean is None else f"{mean:.3f}"]
        cells.append([*start, *each, "no row" if mean is None else _signed(whole), *last, _missing(lines)])
    if pairs:
        total = [_signed(promised), "", *_realized(promised, realized)]
        cells.append(["all served", "", "", "", *[""] * len(ops), *total, ""])
    overall = f"**{math.exp(fmean(map(math.log, means.values()))):.3f}**" if means else "unknown"
    title = (
        "What the ops alone promise a decode step, ms: for each calls x (production's fastest - ours), of the rows "
        f"nearest to the call, context {context} ({origin(used, files)}); realized: the median time between tokens, "
        "host - host+fk, at as many requests. Measured: the share of the step's floor that has rows. Speed-up: the "
        "geometric mean of all measured ops, weighted by production's ms, those too that a patched server leaves "
        f"alone; over the {len(means)} of {len(pays.MODELS) * len(pays.BATCHES)} lines of batch "
        f"{', '.join(map(str, pays.BATCHES))} that have {100 * ENOUGH:.0f}% measured {overall}:"
    )
    columns = [
        "model",
        "batch",
        "measured",
        "speed-up",
        *ops,
        "predicted",
        "host",
        "realized",
        "realized / predicted",
    ]
    yield title, [*columns, "calls without a row"], cells


def realized(files: Files) -> Iterator[Table]:
    """What patched servers realized of what was promised, a line a number of requests."""
    known, pairs = points(files), served(files)
    if not known or not pairs:
        return
    cells, promised, saved = [], 0.0, 0.0
    for pair in pairs:
        lines = pays.lines(pair.model, pair.requests, pair.context, known)
        whole = sum(x.saved_ms for x in lines if x.call.op in pair.ops)
        promised, saved = promised + whole, saved + pair.saved_ms
        times = [
            f"{pair.stock_ms:.2f}",
            f"{pair.patched_ms:.2f}",
            _signed(whole),
            *_realized(whole, pair.saved_ms),
        ]
        missing = _missing([x for x in lines if x.call.op in pair.ops])
        cells.append([pair.host, str(pair.requests), *times, missing])
    cells.append(["all", "", "", "", _signed(promised), *_realized(promised, saved), ""])
    used = [r for r in flat(files) if r.command in USED]
    title = (
        f"ms a decode step of {', '.join(dict.fromkeys(p.model for p in pairs))}: what the ops that were put in "
        f"promise, each by itself, and what the patched server realized ({origin(used, files)}):"
    )
    columns = ["host", "requests", "ITL", "ITL patched", "predicted", "realized", "realized / predicted"]
    yield title, [*columns, "ops without a row"], cells


def _op_ms(op: str, lines: Sequence[Line]) -> str:
    """Empty where the step has no such call; 'no row': none near was measured; '+ ?': none near a part of them."""
    mine = [x for x in lines if x.call.op == op]
    known = [x for x in mine if x.point is not None]
    if not known:
        return "no row" if mine else ""
    return _signed(sum(x.saved_ms for x in known)) + (" + ?" if len(known) < len(mine) else "")


def _realized(whole: float, saved: float) -> list[str]:
    return [_signed(saved), f"**{round(saved / whole, 2) + 0.0:.2f}**" if whole > 0 else "nothing promised"]


def _signed(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 0.0005 else "0.000"
