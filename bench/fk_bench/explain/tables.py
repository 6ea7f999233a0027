"""The tables of `fk-bench explain`, made from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fk_bench.core.model_names import hub_name
from fk_bench.core.rows import Row
from fk_bench.e2e.gains import Gain
from fk_bench.e2e.loads import Load
from fk_bench.kernels.judge.clock import roofline

Table = tuple[str, list[str], list[list[str]]]
GROUP_ORDER = ("linears", "attention", "experts", "collectives", "rest")


def bound(size: int, work: int, dtype: str, gpu: roofline.Peaks) -> str:
    """The resource that bounds a call: 'memory' or 'compute'."""
    return (
        "memory"
        if roofline.floor_us(size, 0, dtype, gpu) == roofline.floor_us(size, work, dtype, gpu)
        else "compute"
    )


def tables(found: Sequence[Row], note: str = "") -> Iterator[Table]:
    """A table of calls for each step, then one table with a line for each step."""
    steps = [r for r in found if r.kind == "step"]
    for each in steps:
        calls = [r for r in found if r.kind == "call" and _key(r) == _key(each)]
        timed = any("best_us" in r.metrics for r in calls)
        yield _title(each, note), *(_timed(calls, each) if timed else _floors(calls, each))
    if len(steps) > 1 and all("floor_ms" in s.metrics for s in steps):
        yield _growth(steps)


def measured(nearest: Sequence[Sequence[Gain]]) -> Iterator[Table]:
    """Gains of a patch in the nearest measured models: a line for each model, chip and host."""
    if nearest:
        columns = ["model", "chip", "host", "time per token", "prompts", "measured"]
        cells = [
            [hub_name(found[0].model), found[0].chip, found[0].host, _at(found, True), _at(found, False),
             max(gain.date for gain in found)]
            for found in nearest
        ]  # fmt: skip
        yield (
            "Measured gains of the nearest models (REQUESTSxINPUT+OUTPUT tokens; above 1 is faster)",
            columns,
            cells,
        )


def _at(found: Sequence[Gain], decoding: bool) -> str:
    mine = sorted((g for g in found if g.decoding == decoding), key=lambda g: Load.parse(g.load).requests)
    return ", ".join(f"{gain.load}: {gain.ratio:.2f}" for gain in mine)


def _key(row: Row) -> tuple[object, ...]:
    return row.subject.model, *(
        row.case[k] for k in ("phase", "batch", "context", "tensor_parallel", "dtype")
    )


def _title(row: Row, note: str) -> str:
    c = row.case
    ranks = f", rank 0 of {c['tensor_parallel']}" if c["tensor_parallel"] > 1 else ""
    floors = f", floors of {c['floors_of']}" if c["floors_of"] else ""
    said = f" ({note})" if note else f", providers of {row.subject.host} on {row.machine.gpu}"
    work = f"{c['phase']} of {c['batch']} x {c['context']} tokens, {c['dtype']}"
    return f"{row.subject.model}, {work}{ranks}{floors}{said}"


def _floors(calls: Sequence[Row], total: Row) -> tuple[list[str], list[list[str]]]:
    columns = [
        "module",
        "op",
        "calls",
        "MB per call",
        "MFLOP per call",
        "bound by",
        "floor us per call",
        "floor ms per step",
        "%",
    ]
    whole = total.metrics.get("floor_ms")
    cells = []
    for r in calls:
        floor = r.metrics.get("floor_us")
        step_ms = None if floor is None else r.case["count"] * floor / 1e3
        cells.append([
            r.case["label"], str(r.subject.op), str(r.case["count"]), number(r.metrics["bytes"] / 1e6),
            number(r.metrics["flops"] / 1e6), r.case.get("bound", ""), number(floor), millis(step_ms),
            _share(step_ms, whole),
        ])  # fmt: skip
    for group in _groups(total):
        ms = total.metrics[f"floor_{group}_ms"]
        cells.append([group, "", "", "", "", "", "", millis(ms), _share(ms, whole)])
    cells.append(["step", "", "", "", "", "", "", millis(whole), _share(whole, whole)])
    return columns, cells


def _share(part: float | None, whole: float | None) -> str:
    return "" if part is None or not whole else f"{100 * part / whole:.1f}"


def _timed(calls: Sequence[Row], total: Row) -> tuple[list[str], list[list[str]]]:
    host = total.subject.host or ""
    columns = ["module", "op", "calls", "MB per call", "floor us", f"{host} us", "ours us", "best us",
               "floor ms per step", f"{host} ms per step", "gain ms per step"]  # fmt: skip
    cells = []
    for r in calls:
        m, count = r.metrics, r.case["count"]
        per_step = [None if v is None else count * v / 1e3 for v in (m.get("floor_us"), m.get("host_us"))]
        gain = None if "gain_us" not in m else m["gain_us"] / 1e3
        cells.append([
            r.case["label"], str(r.subject.op), str(count), number(m["bytes"] / 1e6), number(m.get("floor_us")),
            *(_by(r, who) for who in ("host", "ours", "best")), *map(millis, per_step),
            millis(gain) if r.case["patched"] else "not patched",
        ])  # fmt: skip
    m = total.metrics
    for group in _groups(total):
        sums = [m.get(f"{name}_{group}_ms") for name in ("floor", "step", "gain")]
        cells.append([group, "", "", "", "", "", "", "", *map(millis, sums)])
    measured = millis(m["step_ms"]) if "step_ms" in m else f"{millis(m.get('measured_ms'))} (partial)".strip()
    last = [millis(m.get("floor_ms")), measured, millis(m.get("predicted_gain_ms"))]
    return columns, [*cells, ["step", "", "", "", "", "", "", "", *last]]


def _by(row: Row, who: str) -> str:
    """Time and provider; 'ours/NAME' for one of ours."""
    if who not in row.case:
        return ""
    name = row.case[who].removeprefix("ours/") if who == "ours" else row.case[who]
    return f"{number(row.metrics[f'{who}_us'])} {name}"


def _groups(total: Row) -> list[str]:
    return [g for g in GROUP_ORDER if any(f"{name}_{g}_ms" in total.metrics for name in ("floor", "step"))]


def _growth(steps: Sequence[Row]) -> Table:
    groups = [g for g in GROUP_ORDER if any(f"floor_{g}_ms" in s.metrics for s in steps)]
    timed = any("step_ms" in s.metrics for s in steps)
    columns = ["batch", "context", *(f"{g} ms" for g in groups), "floor ms", "tokens/s at the floor"]
    columns += [f"{steps[0].subject.host} ms", "gain ms"] if timed else []
    cells = []
    for s in steps:
        m = s.metrics
        floors = [millis(m.get(name)) for name in (*(f"floor_{g}_ms" for g in groups), "floor_ms")]
        times = [millis(m.get(name)) for name in ("step_ms", "predicted_gain_ms")] if timed else []
        sizes = [str(s.case[name]) for name in ("batch", "context")]
        cells.append([*sizes, *floors, number(m.get("floor_tokens_per_s")), *times])
    first = steps[0]
    title = f"{first.subject.model}, {first.case['phase']}: step floors by batch and context, {first.case['floors_of']}"
    return title, columns, cells


def reasons(found: Sequence[Row]) -> list[str]:
    """Reasons for missing times, one line for each op and reason."""
    said = [f"{r.subject.op}: {r.reason}" for r in found if r.reason]
    return list(dict.fromkeys(said))


def number(value: float | None) -> str:
    """Three significant digits; '' for None."""
    if value is None:
        return ""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def millis(value: float | None) -> str:
    """Milliseconds with three decimals."""
    return "" if value is None else "<0.001" if 0 < value < 0.0005 else f"{value:.3f}"


def markdown(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """The table as Markdown below its title."""
    lines = [f"{title}:", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells), ""])
