"""The tables of `fk-bench routing`, made from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fk_bench.core.rows import Row, Status

Table = tuple[str, list[str], list[list[Any]]]
SOURCES = ("captured", "uniform", "same")
CLEAR = 1.02  # medians differ clearly if they differ by this factor and their p20-p80 do not overlap


def percentiles(us: Sequence[float]) -> dict[str, float]:
    return {f"time_us_p{p}": float(np.percentile(us, p)) for p in (20, 50, 80)}


def tables(made: Sequence[Row]) -> Iterator[Table]:
    """(title, columns, cells) of every table with rows, capture by capture."""
    names = list(dict.fromkeys(r.case["capture"] for r in made if "capture" in r.case))
    for name in names:
        mine = [r for r in made if r.case.get("capture") == name]
        first = mine[0].case
        head = f"{name} ({first['experts']} experts, {first['topk']} a token)"
        for title, build in (
            ("load of a layer", _load),
            ("experts hit, and the hottest one's load over the mean, by tokens", _batches),
            ("agreement on the hot experts", _identity),
            ("fused_experts, microseconds", _times),
        ):
            columns, cells = build(mine)
            if cells:
                model = next((r.case["model"] for r in mine if "model" in r.case), "")
                where = f" at {model}'s sizes" if build is _times else ""
                yield f"{head}: {title}{where}", columns, cells


def _load(made: list[Row]) -> tuple[list[str], list[list[Any]]]:
    keys = ("max_over_mean", "cv", "gini", "entropy", "hot_share", "hit")
    columns = [
        "layer",
        "routing",
        "tokens",
        "max / mean",
        "CV",
        "Gini",
        "entropy",
        "hot eighth's share",
        "hit",
    ]
    return columns, [
        [r.case["layer"], r.case["routing"], r.case["tokens"], *(_number(r.metrics[k]) for k in keys)]
        for r in made
        if r.kind == "load"
    ]


def _batches(made: list[Row]) -> tuple[list[str], list[list[Any]]]:
    found: dict[int, dict[str, Row]] = {}
    for r in made:
        if r.kind == "batch":
            found.setdefault(r.case["tokens"], {})[r.case["routing"]] = r
    sources = ("uniform", "spread", "decode", "chunk")
    columns = ["tokens", *(f"{s}: hit" for s in sources), *(f"{s}: max / mean" for s in sources)]

    def cells(by: dict[str, Row], key: str) -> list[str]:
        return [_number(by[s].metrics[key]) if s in by else "" for s in sources]

    return columns, [[n, *cells(by, "hit"), *cells(by, "max_over_mean")] for n, by in found.items()]


def _identity(made: list[Row]) -> tuple[list[str], list[list[Any]]]:
    found: dict[str, dict[str, Row]] = {}
    for r in made:
        if r.kind == "identity":
            found.setdefault(r.case["parts"], {})[r.case["routing"]] = r
    keys = [(s, k) for s in ("captured", "uniform") for k in ("jaccard", "spearman")]
    columns = [
        "parts",
        "pairs",
        *(f"{s}: {'Jaccard' if k == 'jaccard' else 'rank correlation'}" for s, k in keys),
    ]
    cells = []
    for parts, by in found.items():
        pairs = next(iter(by.values())).case["pairs"]
        cells.append([parts, pairs, *(_number(by[s].metrics[k]) if s in by else "" for s, k in keys)])
    return columns, cells


def _times(made: list[Row]) -> tuple[list[str], list[list[Any]]]:
    """One line for each number of tokens and kernel."""
    timed = _timed(made)
    kernels = list(dict.fromkeys(k for _, _, k in timed))
    cells = []
    for tokens in dict.fromkeys(n for n, _, _ in timed):
        for kernel in kernels:
            by = {s: timed[tokens, s, kernel] for s in SOURCES if (tokens, s, kernel) in timed}
            if not by:
                continue
            medians = {s: r.metrics["time_us_p50"] for s, r in by.items()}
            ratio = (
                medians["captured"] / medians["uniform"]
                if {"captured", "uniform"} <= medians.keys()
                else None
            )
            first = next(iter(by.values()))
            cells.append([
                tokens, kernel, first.case.get("kernel", ""),
                *(f"{medians[s]:.1f}" if s in medians else "" for s in SOURCES),
                "" if ratio is None else f"{ratio:.3f}",
                *(_number(by[s].case["experts_hit"]) if s in by else "" for s in SOURCES[:2]),
            ])  # fmt: skip
    columns = ["tokens", "kernel", "what", "captured", "uniform", "same experts", "captured / uniform"]
    return [*columns, "hit, captured", "hit, uniform"], cells


def _timed(made: Sequence[Row]) -> dict[tuple[int, str, str], Row]:
    return {
        (r.case["tokens"], r.case["routing"], r.subject.provider or ""): r
        for r in made
        if r.kind == "time" and r.status is Status.OK
    }


def changes(made: Sequence[Row]) -> list[dict[str, Any]]:
    """The ratio of times by routing, for each capture, number of tokens and pair of kernels. `changed`: the winner
    under captured routing clearly (see CLEAR) differs from the winner under uniform routing.
    """
    found = []
    for name in dict.fromkeys(
        r.case.get("capture") for r in made if r.kind == "time" and "capture" in r.case
    ):
        timed = _timed([r for r in made if r.case.get("capture") == name])
        kernels = list(dict.fromkeys(k for _, _, k in timed))
        for tokens in dict.fromkeys(n for n, _, _ in timed):
            for i, a in enumerate(kernels):
                for b in kernels[i + 1 :]:
                    pairs = {
                        s: (timed[tokens, s, a], timed[tokens, s, b])
                        for s in SOURCES
                        if (tokens, s, a) in timed and (tokens, s, b) in timed
                    }
                    if not {"captured", "uniform"} <= pairs.keys():
                        continue
                    ratios = {s: _median(x) / _median(y) for s, (x, y) in pairs.items()}
                    signs = [_sign(*pairs[s]) for s in ("captured", "uniform")]
                    found.append(
                        {"capture": name, "tokens": tokens, "a": a, "b": b, "ratios": ratios,
                         "changed": signs[0] * signs[1] < 0, "differs": signs[0] != signs[1]}
                    )  # fmt: skip
    return found


def _median(row: Row) -> float:
    return row.metrics["time_us_p50"]


def _sign(a: Row, b: Row) -> int:
    """1 if a is clearly slower, -1 if b is, 0 otherwise."""
    for slow, fast, sign in ((a, b, 1), (b, a, -1)):
        clear = slow.metrics["time_us_p20"] > fast.metrics["time_us_p80"]
        if clear and _median(slow) >= CLEAR * _median(fast):
            return sign
    return 0


def markdown(title: str, columns: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    lines = [f"**{title}**", "", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in cells), ""])


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.3g}"
