"""Ratios of `fk-bench patch-compare`: a patched host against the same host, and its tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fk_bench.core.rows import Row, Status
from fk_bench.core.stats import mean_ci, mean_of_means, paired_ratio
from fk_bench.core.terminal.output import table
from fk_bench.e2e.loads import Load

COMMAND = "patch-compare"
STATES = "stock", "patched"
ENGINE = "fastkernels"  # the state of a run in our engine
OUTPUT, INPUT, TPOT = "output_tokens_per_s", "input_tokens_per_s", "tpot_ms"
REQUESTS, LATENCY = "requests_per_s", "latency_ms"  # of texts that are embedded
THROUGHPUT = OUTPUT, REQUESTS  # a load has one of these
FIRST_SECONDS = "first_tokens_s"  # until all requests have as many tokens as a first run generates
METRICS = {  # metric: (title, whether more is better)
    TPOT: ("TPOT", False), "ttft_ms": ("TTFT", False), INPUT: ("input tok/s", True), OUTPUT: ("output tok/s", True),
    LATENCY: ("latency", False), REQUESTS: ("requests/s", True),
}  # fmt: skip
DECODED = 16  # output tokens from which a load has a TPOT worth comparing
MARGIN = 0.02  # by which the stock host may differ after an undo from before it
BUSY = 0.85  # share of a step in which the GPU computes, from which its kernels decide about TPOT


def summary(made: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each model and load: medians of the states, and ratios with their intervals."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in made:
        if "load" in row.case and row.case["state"] in (*STATES, ENGINE) and row.status is Status.OK:
            groups.setdefault((shown_model(row), row.case["load"]), []).append(row)
    return [{"model": model, "load": load, **_compared(group)} for (model, load), group in groups.items()]


def newest_run(made: Sequence[Row]) -> list[Row]:
    """Of the rows of one model and load: the timed ones of their newest run, and the traced ones of theirs."""
    found = list[Row]()
    for traced in (False, True):
        rows = [row for row in made if bool(row.case.get("traced")) is traced]
        newest = max(rows, key=lambda row: row.time, default=None)
        found += [row for row in rows if newest is not None and row.run_id == newest.run_id]
    return found


def shown_model(row: Row) -> str:
    """The model of a row, with its requests' media, and the type of its KV cache if that is not the host's default."""
    model, dtype = row.subject.model or "", row.case.get("kv_cache_dtype", "auto")
    if row.case.get("images"):
        model += f", images {row.case['images']}"
    if row.case.get("audio"):
        model += f", audio {row.case['audio']:g} s"
    return model if dtype == "auto" else f"{model}, KV cache {dtype}"


def undo_rows(
    made: Sequence[Row],
) -> Iterator[tuple[dict[str, Any], dict[str, float], dict[str, tuple[float, float]]]]:
    """(case, metrics, 95% intervals) of the stock host after an undo over before the patch: of each load, then of all.

    Above 1 is faster after the undo. The value of an alternation is the mean of its runs' logarithms, and the interval
    is Student's t over the alternations: what compiling again or another layout of memory changes is a sample each.
    `first`: the stock host after all undos over the one that was never patched. `within`: the later half of the runs
    of a stock state over the earlier half, which no patch is between.
    """
    stock = [
        r
        for r in made
        if r.case.get("state") == STATES[0] and r.status is Status.OK and r.case.get("run", -1) >= 0
    ]
    loads = list(dict.fromkeys(row.case["load"] for row in stock))
    every: dict[str, list[list[float]]] = {}
    of_all = OUTPUT
    for load in loads:
        alternations = 0
        of_load = [row for row in stock if row.case["load"] == load]
        metrics: dict[str, float] = {}
        intervals: dict[str, tuple[float, float]] = {}
        for metric, (_, more) in METRICS.items():
            if metric == TPOT and Load.parse(load).output_len < DECODED:
                continue
            found = _undone(of_load, metric, 1.0 if more else -1.0)
            for name, logs in found.items():
                _exponential(metrics, intervals, f"{metric}_{name}", logs)
            if metric in THROUGHPUT and found["undo_ratio"]:
                alternations, of_all = len(found["undo_ratio"]), metric
                for name, logs in found.items():
                    every.setdefault(name, []).append(logs)
        if metrics:
            yield {"load": load, "alternations": alternations}, metrics, intervals
    metrics, intervals = {}, {}
    for name, lists in every.items():
        count = min(map(len, lists))
        logs = [statistics.fmean(values[i] for values in lists) for i in range(count)]
        _exponential(metrics, intervals, f"{of_all}_{name}", logs)
    if metrics:
        yield {"loads": loads, "alternations": min(map(len, every["undo_ratio"]))}, metrics, intervals


def _exponential(
    metrics: dict[str, float], intervals: dict[str, tuple[float, float]], name: str, logs: Sequence[float]
) -> None:
    if logs:
        mean, interval = mean_ci(logs)
        metrics[name] = math.exp(mean)
        if interval is not None:
            intervals[name] = math.exp(interval[0]), math.exp(interval[1])


def _undone(stock: Sequence[Row], metric: str, sign: float) -> dict[str, list[float]]:
    """Logarithms of one metric's ratios, above 0 if better: after each undo, after all, and within a state."""
    blocks: dict[int, dict[int, float]] = {}
    for row in stock:
        if metric in row.metrics:
            blocks.setdefault(row.case["block"], {})[row.case["run"]] = sign * math.log(row.metrics[metric])
    found: dict[str, list[float]] = {"undo_ratio": [], "undo_first_ratio": [], "undo_within_ratio": []}
    for block, runs in sorted(blocks.items()):
        for name, before in (("undo_ratio", block - 2), ("undo_first_ratio", 0)):
            if both := sorted(runs.keys() & blocks.get(before, {}).keys()) if block else []:
                found[name].append(statistics.fmean(runs[run] - blocks[before][run] for run in both))
        if half := len(runs) // 2:
            values = [runs[run] for run in sorted(runs)]
            found["undo_within_ratio"].append(
                statistics.fmean(values[-half:]) - statistics.fmean(values[:half])
            )
    return found


def undo_verdict(row: Row) -> str:
    """Whether the stock host has its speed back after an undo: of the row of all loads."""
    metric = throughput_of(row.metrics, "_undo_ratio")
    name = f"{metric}_undo_ratio"
    interval = row.ci95.get(name)
    count = row.case["alternations"]
    value = f"{shown_model(row)}: stock after undo over before: {row.metrics[name]:.3f}"
    if interval is None:
        return f"{value} in one alternation: no interval; --alternations 5 gives one"
    within = interval[0] >= 1 - MARGIN and interval[1] <= 1 + MARGIN
    said = f"{'' if within else 'not '}within {MARGIN:.0%} of 1"
    if not within and interval[0] <= 1 <= interval[1]:
        said += " (the interval includes 1: more alternations narrow it)"
    first, apart = (row.metrics.get(f"{metric}_undo_{kind}_ratio", math.nan) for kind in ("first", "within"))
    return (
        f"{value} [{interval[0]:.3f}, {interval[1]:.3f}] over {count} alternations, {METRICS[metric][0]}: {said};"
        f" over never patched {first:.3f}, within a stock state {apart:.3f}"
    )


def show_undo(made: Sequence[Row]) -> None:
    """Print the ratios of the stock host after undo over before it, by load, and a verdict for each model."""
    found = [row for row in made if row.case.get("state") == "undo"]
    used = [m for m in METRICS if any(f"{m}_undo_ratio" in row.metrics for row in found)]
    cells = [
        [shown_model(row), row.case["load"], *(_of_row(row, f"{m}_undo_ratio") for m in used)]
        for row in found
        if "load" in row.case
    ]
    if cells:
        title = "stock after undo over before it: times better, with the 95% interval over the alternations"
        table(title, ["model", "load", *(METRICS[m][0] for m in used)], cells)
    for row in found:
        if "load" not in row.case and throughput_of(row.metrics, "_undo_ratio"):
            print(undo_verdict(row))


def _of_row(row: Row, name: str) -> str:
    if name not in row.metrics:
        return ""
    return _with_interval({name: row.metrics[name], f"{name}_ci95": row.ci95.get(name)}, name)


def _compared(group: Sequence[Row]) -> dict[str, Any]:
    plain = [row for row in group if not row.case.get("traced")]
    of_host = [row for row in plain if row.case["state"] != ENGINE]
    runs = {(row.case["block"], row.case["run"]): row.metrics for row in of_host}
    ours = {(r.case["block"], r.case["run"]): r.metrics for r in plain if r.case["state"] == ENGINE}
    again = {row.case["block"] for row in of_host if row.case.get("again")}
    line: dict[str, Any] = {}
    for state, parity in zip(STATES, (0, 1), strict=True):
        _medians(line, state, {(b, r): m for (b, r), m in runs.items() if b % 2 == parity})
        traced = [r for r in group if r.case.get("traced") and r.case["state"] == state]
        if traced:
            line[f"{state}_gpu_step_ms"] = statistics.median(r.metrics["gpu_step_ms"] for r in traced)
            line[f"{state}_allocations"] = max(r.metrics["allocations"] for r in traced)
            if f"{state}_{TPOT}" in line:
                line[f"{state}_gpu_busy"] = line[f"{state}_gpu_step_ms"] / line[f"{state}_{TPOT}"]
    _medians(line, ENGINE, ours)
    for metric, (_, more) in METRICS.items():
        pairs, noise = _pairs(runs, metric, again)
        with_ours = [
            (m[metric], ours[at][metric])
            for at, m in sorted(runs.items())
            if at in ours and at[1] >= 0 and metric in m and metric in ours[at]
        ]
        for name, chosen in (("ratio", pairs), ("noise", noise), (f"{ENGINE}_ratio", with_ours)):
            _ratio(line, f"{metric}_{name}", chosen, more)
        if again:
            _ratio(
                line,
                f"{metric}_first_ratio",
                _pairs(runs, metric, {block for block, _ in runs} - again)[0],
                more,
            )
        if metric in THROUGHPUT and pairs:
            line["ratios"] = [patched / stock for stock, patched in pairs]
    return line


def _medians(line: dict[str, Any], state: str, runs: dict[tuple[int, int], dict[str, float]]) -> None:
    later, firsts = (
        [m for (_, number), m in runs.items() if (number >= 0) == which] for which in (True, False)
    )
    for name in (*METRICS, "step_ms_p50", "step_ms_p99", "step_ms_max"):
        if values := [m[name] for m in later if name in m]:
            line[f"{state}_{name}"] = statistics.median(values)
    usual = [m[FIRST_SECONDS] for m in later if FIRST_SECONDS in m]
    first = [m[FIRST_SECONDS] for m in firsts if FIRST_SECONDS in m]
    if first and usual:
        line[f"{state}_first_run_ratio"] = max(first) / statistics.median(usual)


def _ratio(line: dict[str, Any], name: str, pairs: Sequence[tuple[float, float]], more: bool) -> None:
    """pairs: (the host's value, the other's)."""
    if pairs:
        theirs, ours = zip(*pairs, strict=True)
        line[name], line[f"{name}_ci95"] = paired_ratio(ours, theirs) if more else paired_ratio(theirs, ours)


def _pairs(
    runs: dict[tuple[int, int], dict[str, float]], metric: str, only: Collection[int] = ()
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(stock, patched) of each patched run, and (stock before, stock after) around it; of the blocks `only`, if any."""
    pairs, noise = [], []
    for (block, number), metrics in sorted(runs.items()):
        around = [runs.get((block + step, number), {}).get(metric) for step in (-1, 1)]
        before, after = around
        if block % 2 == 0 or number < 0 or metric not in metrics or before is None or after is None:
            continue
        if only and block not in only:
            continue
        pairs.append(((before + after) / 2, metrics[metric]))
        noise.append((before, after))
    return pairs, noise


def over_loads(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each model: the geometric mean of its loads' throughput ratios with its interval, and the least."""
    found = []
    for model in dict.fromkeys(line["model"] for line in results):
        own = [line for line in results if line["model"] == model and line.get("ratios")]
        if not own:
            continue
        mean, interval = mean_of_means([[math.log(r) for r in line["ratios"]] for line in own])
        found.append({
            "model": model, "loads": len(own), "output_ratio": math.exp(mean),
            "output_ratio_ci95": None if interval is None else [math.exp(b) for b in interval],
            "least": min(line[f"{throughput_of(line)}_ratio"] for line in own),
        })  # fmt: skip
    return found


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print tables: medians, ratios, steps of decoding, latency per token by model, and throughput over all loads."""
    if not results:
        print("nothing was measured")
        return
    states = (*STATES, ENGINE) if any(f"{ENGINE}_{TPOT}" in line for line in results) else STATES
    measured = {
        m: title for m, (title, _) in METRICS.items() if any(f"stock_{m}" in line for line in results)
    }
    columns = ["model", "load", *(f"{title} {' / '.join(states)}" for title in measured.values())]
    cells = [
        [line["model"], line["load"]]
        + [
            " / ".join(f"{line.get(f'{s}_{m}', math.nan):.4g}" for s in states)
            if f"stock_{m}" in line
            else ""
            for m in measured
        ]
        for line in results
    ]
    table("medians: TPOT and TTFT in ms", columns, cells)
    columns = ["model", "load", *(h for title in measured.values() for h in (title, "noise"))]
    cells = [
        [line["model"], line["load"]]
        + [_with_interval(line, f"{m}_{k}") for m in measured for k in ("ratio", "noise")]
        for line in results
    ]
    table("times better when patched; noise: stock against stock", columns, cells)
    names = ("step_ms_p50", "step_ms_p99", "step_ms_max", "first_run_ratio", "gpu_busy", "allocations")
    used = [name for name in names if any(f"stock_{name}" in line for line in results)]
    cells = [
        [line["model"], line["load"]]
        + [" / ".join(f"{line[f'{s}_{n}']:.3g}" for s in STATES if f"{s}_{n}" in line) for n in used]
        for line in results
    ]
    table("steps of decoding, stock / patched", ["model", "load", *used], cells)
    if len(states) > len(STATES):
        columns = ["model", "load", *measured.values()]
        cells = [
            [line["model"], line["load"], *(_with_interval(line, f"{m}_{ENGINE}_ratio") for m in measured)]
            for line in results
        ]
        table(f"{ENGINE}: times better than the stock host", columns, cells)
    _show_latency(results)
    _show_throughput(results)


def _show_latency(results: Sequence[dict[str, Any]]) -> None:
    """TPOT of each model, by load, and the GPU's share of a stock step."""
    lines = {(line["model"], line["load"]): line for line in decoding(results)}
    models, loads = (list(dict.fromkeys(of)) for of in zip(*lines, strict=True)) if lines else ([], [])
    cells = [
        [model, *(_with_interval(lines.get((model, load), {}), f"{TPOT}_ratio") for load in loads)]
        for model in models
    ]
    for title, least in (("all models", 0.0), (f"GPU busy for {BUSY:.0%} or more", BUSY)):
        groups = [tpot_ratios(results, load, least) for load in loads]
        if any(groups):
            cells.append([title, *(mean_and_least(values) for values in groups)])
    if cells:
        table("TPOT, times better when patched", ["model", *loads], cells)
    busy = {
        at: line for at, line in lines.items() if "stock_gpu_busy" in line and "patched_gpu_step_ms" in line
    }
    if busy:
        cells = [[model, *(_gpu(busy.get((model, load), {})) for load in loads)] for model in models]
        table(
            "the GPU's share of a stock step; its time alone, times better when patched",
            ["model", *loads],
            cells,
        )


def decoding(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of loads with enough output tokens for a TPOT."""
    return [n for n in results if f"{TPOT}_ratio" in n and Load.parse(n["load"]).output_len >= DECODED]


def tpot_ratios(results: Sequence[dict[str, Any]], load: str, busy: float = 0.0) -> list[float]:
    """The TPOT ratios of all models with this load whose GPU is busy for at least this share of a stock step."""
    chosen = (n for n in decoding(results) if n["load"] == load and n.get("stock_gpu_busy", 0.0) >= busy)
    return [n[f"{TPOT}_ratio"] for n in chosen]


def _gpu(line: dict[str, Any]) -> str:
    if not line:
        return ""
    return f"{line['stock_gpu_busy']:.0%}; {line['stock_gpu_step_ms'] / line['patched_gpu_step_ms']:.3f}"


def throughput_of(values: Mapping[str, Any], suffix: str = "_ratio") -> str:
    """The metric of throughput of which a line or a row's metrics have this value; '' without one."""
    return next((metric for metric in THROUGHPUT if f"{metric}{suffix}" in values), "")


def _show_throughput(results: Sequence[dict[str, Any]]) -> None:
    """Throughput of each model, by load, and over all."""
    loads = list(dict.fromkeys(line["load"] for line in results))
    lines = {(line["model"], line["load"]): line for line in results}
    cells = []
    for one in over_loads(results):
        row = []
        for load in loads:
            line = lines.get((one["model"], load), {})
            metric = throughput_of(line)
            first = line.get(f"{metric}_first_ratio")
            both = "" if first is None else f" (first {first:.3f})"
            row.append(f"{line[f'{metric}_ratio']:.3f}{both}" if metric else "")
        cells.append([one["model"], *row, _with_interval(one, "output_ratio"), f"{one['least']:.3f}"])
    if cells:
        title = (
            "output tokens or texts per second, patched over stock; a load that was slower is measured again"
        )
        table(title, ["model", *loads, "geometric mean", "least"], cells)


def _with_interval(line: dict[str, Any], name: str) -> str:
    if name not in line:
        return ""
    interval = line[f"{name}_ci95"]
    return f"{line[name]:.3f}" + ("" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]")


def mean_and_least(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = math.exp(statistics.fmean(map(math.log, values)))
    return f"{mean:.3f}, least {min(values):.3f} of {len(values)}"
