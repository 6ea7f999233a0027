"""Tables of many models, stock and patched in one engine, from the rows of `fk-bench patch-compare`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fk_bench.core.rows import Row
from fk_bench.e2e import ratios
from fk_bench.e2e.loads import Kind, Load
from fk_bench.e2e.ratios import COMMAND, ENGINE, INPUT, OUTPUT, TPOT
from fk_bench.explain.tables import Table
from fk_bench.tables.origin import Files, flat, origin

HOSTS = {"vllm": "vLLM", "sglang": "SGLang"}
WAYS = "before_construction", "no_table"
Line = dict[str, Any]


def _made(
    files: Files, title: str, lines: Callable[[list[Line]], tuple[list[str], list[list[str]]]]
) -> Iterator[Table]:
    """A table for each host and way of patching. Of each model and load the newest run counts."""
    groups: dict[tuple[Any, ...], dict[tuple[str, str], list[Row]]] = {}
    for row in flat(files):
        if row.command == COMMAND and "load" in row.case:
            way = row.subject.host, *(row.case.get(way, False) for way in WAYS)
            of = ratios.shown_model(row), row.case["load"]
            groups.setdefault(way, {}).setdefault(of, []).append(row)
    for (host, before, no_table), found in groups.items():
        used = [row for of_load in found.values() for row in ratios.newest_run(of_load)]
        columns, cells = lines(ratios.summary(used))
        if cells:
            name = HOSTS.get(host, host)
            how = ("before construction" if before else "live") + (
                ", without a tuned table" if no_table else ""
            )
            yield f"{title}: {name}, patched {how} ({origin(used, files)}).", columns, cells


def _load(line: Line) -> list[str]:
    requests, _, lengths = line["load"].partition("x")
    return [line["model"], requests, lengths.replace("+", ", ")]


def prompts(files: Files) -> Iterator[Table]:
    """Prompts: input throughput, time to the first token, and the ratios, a line for each model and load."""
    yield from _kinds(files, "Prompts", (Kind.PROMPTS, Kind.HITS), (INPUT, "ttft_ms"))


def contexts(files: Files) -> Iterator[Table]:
    """Decodes at long contexts: the time per output token."""
    yield from _kinds(files, "Decodes at long contexts", (Kind.CONTEXT,), (TPOT, OUTPUT))


def mixed(files: Files) -> Iterator[Table]:
    """Prompts that arrive during decodes: TPOT of the decodes, TTFT of the prompts, and output throughput."""
    yield from _kinds(files, "Prompts that arrive during decodes", (Kind.MIXED,), (TPOT, "ttft_ms", OUTPUT))


def _four_digits(value: float) -> str:
    """Without an exponent."""
    return f"{float(f'{value:.4g}'):,.10g}"


def _kinds(files: Files, title: str, kinds: Sequence[Kind], metrics: Sequence[str]) -> Iterator[Table]:
    """A table for each metric: medians of these kinds of loads, ratios of the patched host and of our engine."""
    for metric in metrics:
        name = ratios.METRICS[metric][0] + (", ms" if metric.endswith("_ms") else "")
        yield from _made(files, f"{title}, {name}", partial(_columns, kinds=kinds, metric=metric))


def _columns(results: list[Line], kinds: Sequence[Kind], metric: str) -> tuple[list[str], list[list[str]]]:
    mine = [n for n in results if Load.parse(n["load"]).kind in kinds and f"{metric}_ratio" in n]
    states = {"stock": "stock", "patched": "patched", ENGINE: "our engine"}
    states = {s: name for s, name in states.items() if any(f"{s}_{metric}" in line for line in mine)}
    compared = {"patched": f"{metric}_ratio", "our engine": f"{metric}_{ENGINE}_ratio"}
    compared = {name: ratio for name, ratio in compared.items() if name in states.values()}
    cells = [
        [line["model"], line["load"]]
        + [_four_digits(line[f"{s}_{metric}"]) if f"{s}_{metric}" in line else "" for s in states]
        + [cell for ratio in compared.values() for cell in _apart(line, ratio)]
        for line in mine
    ]
    better = [title for name in compared for title in (f"{name}, times better", f"{name}, 95%")]
    return ["Model", "Load", *states.values(), *better], cells


def undone(files: Files) -> Iterator[Table]:
    """The stock host after an undo over before the patch, of each model over all its loads."""
    found = [row for row in flat(files) if row.command == COMMAND and row.case.get("state") == "undo"]
    used = [row for row in found if "load" not in row.case and f"{OUTPUT}_undo_ratio" in row.metrics]
    cells = []
    for row in used:
        name = f"{OUTPUT}_undo_ratio"
        line = {name: row.metrics[name], f"{name}_ci95": row.ci95.get(name)}
        alternations = str(row.case["alternations"])
        cells.append(
            [ratios.shown_model(row), alternations, str(len(row.case["loads"])), _interval(line, name)]
        )
    if cells:
        title = (
            f"Output tokens/s of the stock host after an undo over before the patch ({origin(used, files)})."
        )
        yield title, ["Model", "Alternations", "Loads", "Ratio (95%)"], cells


def models(files: Files) -> Iterator[Table]:
    """TPOT of each model and load, and its geometric means over the models."""

    def lines(results: list[Line]) -> tuple[list[str], list[list[str]]]:
        cells = []
        for line in ratios.decoding(results):
            busy = f"{line['stock_gpu_busy']:.0%}" if "stock_gpu_busy" in line else ""
            cells.append([
                *_load(line), f"{line[f'stock_{TPOT}']:.2f}", f"{line[f'patched_{TPOT}']:.2f}",
                _interval(line, f"{TPOT}_ratio"), busy,
            ])  # fmt: skip
        for load in dict.fromkeys(line["load"] for line in ratios.decoding(results)):
            for name, least in (
                ("all models", 0.0),
                (f"GPU busy for {ratios.BUSY:.0%} or more", ratios.BUSY),
            ):
                if found := ratios.tpot_ratios(results, load, least):
                    cells.append(
                        [*_load({"model": name, "load": load}), "", "", ratios.mean_and_least(found), ""]
                    )
        columns = [
            "Model",
            "Requests",
            "Tokens in, out",
            "Stock, ms",
            "Patched, ms",
            "Times better",
            "GPU busy",
        ]
        return columns, cells

    yield from _made(files, "Time per output token", lines)


def throughput(files: Files) -> Iterator[Table]:
    """Output throughput of each model over all its loads."""

    def lines(results: list[Line]) -> tuple[list[str], list[list[str]]]:
        loads = list(dict.fromkeys(line["load"] for line in results))
        by = {(line["model"], line["load"]): line.get(f"{OUTPUT}_ratio") for line in results}
        cells = [
            [one["model"], *(_number(by.get((one["model"], load))) for load in loads), _interval(one, "output_ratio"),
             f"{one['least']:.3f}"]
            for one in ratios.over_loads(results)
        ]  # fmt: skip
        return ["Model", *loads, "Geometric mean (95%)", "Least"], cells

    yield from _made(files, "Output tokens per second, patched over stock, at REQUESTSxINPUT+OUTPUT", lines)


def engines(files: Files) -> Iterator[Table]:
    """Our engine, the stock host and the patched host on the same prompts."""
    states = ("stock", "patched", ENGINE)

    def lines(results: list[Line]) -> tuple[list[str], list[list[str]]]:
        cells = [
            [*_load(line), *(f"{line[f'{s}_{OUTPUT}']:.0f}" for s in states),
             *(f"{line[f'{s}_{TPOT}']:.2f}" for s in states), _interval(line, f"{OUTPUT}_{ENGINE}_ratio")]
            for line in results
            if f"{OUTPUT}_{ENGINE}_ratio" in line and f"patched_{OUTPUT}" in line
        ]  # fmt: skip
        columns = ["Model", "Requests", "Tokens in, out"]
        columns += [f"{s}, {what}" for what in ("tok/s", "TPOT ms") for s in states]
        return [*columns, f"{ENGINE} / stock, tok/s"], cells

    yield from _made(files, "Output throughput and time per output token, offline", lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _apart(line: Mapping[str, Any], name: str) -> tuple[str, str]:
    """A ratio and its interval, for columns of their own."""
    ratio, _, interval = _interval(line, name).partition(" (")
    return ratio, interval.rstrip(")")


def _interval(line: Mapping[str, Any], name: str) -> str:
    if name not in line:
        return ""
    interval = line.get(f"{name}_ci95")
    return f"{line[name]:.3f}" + ("" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})")
