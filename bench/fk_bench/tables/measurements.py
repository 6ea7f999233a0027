"""Measurements of single calls, by shape: our time and that of the fastest production kernel in the same run.

Sources: the judge, `fk-bench explain` on a GPU, and the experiments on linear layers and decode attention.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch

from fastkernels.core import registry, tuning
from fk_bench.core import scores
from fk_bench.core.rows import Row, Status
from fk_bench.explain import provider_times
from fk_bench.tables.layers import MODEL, groups, timed
from fk_bench.tables.origin import Files

# For ops whose kernel a tuned table picks: the kernels of production, the usual choice first.
PRODUCTION = {"linear": ("cublas",), "attention_decode": ("fa3", "flashinfer")}
HEADS = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}  # of decode_attention's 'llama-8b'
# Dims that state the size of a layer, and those that make it another kind of call.
WIDTHS = (
    "hidden", "in", "out", "d", "heads", "kv_heads", "head_size", "experts", "topk", "intermediate", "vocab", "dim",
)  # fmt: skip
KINDS = (
    "residual", "norms", "window_left", "softcap", "soft_cap", "scales", "bias", "weightless", "var_hidden", "shard",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The properties of a call that its time depends on. load: {'tokens': ..} or {'sequences': .., 'context': ..}."""

    load: Mapping[str, float]
    widths: Mapping[str, float]
    kind: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Point:
    """One measured call: microseconds of ours and of the fastest production kernel, in the same run."""

    op: str
    dtype: str
    shape: Shape
    case: str
    ours_us: float
    production_us: float
    production: str

    @property
    def speedup(self) -> float:
        return self.production_us / self.ours_us


def shape(op: str, dims: Mapping[str, Any]) -> Shape:
    """The shape in a case's dims, from a SPEC or from a row (where lists and tuples are text)."""
    read = {k: _value(v) for k, v in dims.items()}
    lengths = read.get("seq_lens")
    heads = op == "rms_norm" and "heads" in read  # each head is a row of the norm
    if isinstance(lengths, (list, tuple)) and lengths:
        load = {"sequences": float(len(lengths)), "context": fmean(lengths)}
    else:
        tokens = read.get("rows" if op == "sampling" else "tokens", 1)
        load = {"tokens": float(math.prod(tokens) if isinstance(tokens, (list, tuple)) else tokens)}
        load["tokens"] *= read["heads"] if heads else 1
    numbers = {k: read[k] for k in WIDTHS if isinstance(read.get(k), (int, float))}
    widths = {k: float(v) for k, v in numbers.items() if not (heads and k == "heads")}
    kind = [(k, str(read[k])) for k in KINDS if read.get(k) and read[k] != -1]
    return Shape(load, widths, (*kind, *([("heads", "")] if heads else [])))


def _value(value: Any) -> Any:
    if not isinstance(value, str) or value[:1] not in ("(", "["):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):  # truncated text: a list of many sequences
        return None


def distance(a: Shape, b: Shape, most: float, widest: float) -> float | None:
    """0 if equal, larger the less alike; None if one cannot stand for the other.

    most, widest: highest allowed ratio of tokens, and of layer widths
    """
    if a.kind != b.kind or a.load.keys() != b.load.keys():
        return None
    found = 0.0
    for mine, other, limit in ((a.load, b.load, most), (a.widths, b.widths, widest)):
        for key in sorted(mine.keys() & other.keys()):
            if min(mine[key], other[key]) <= 0:
                return None
            far = abs(math.log(mine[key] / other[key]))
            if far > math.log(limit) + 1e-9:
                return None
            found += far
    return found


def points(files: Files) -> list[Point]:
    """All points. Of two equally near ones the first counts: files in the given order, later rows first."""
    found: list[Point] = []
    for name, mine in files.items():
        made = [p for r in scores.latest(mine) for p in _judged(r)]
        made += [p for r in mine if r.command == "explain" for p in _explained(r)]
        layers = timed({name: mine}, "skinny_linear")
        calls = timed({name: mine}, "decode_attention")
        made += [p for g in groups(layers, "tokens", "out", "in").values() for p in _layer(g)]
        made += [
            p for g in groups(calls, "model", "batch", "context", "capacity").values() for p in _attention(g)
        ]
        found += reversed(made)
    return found


def _judged(row: Row) -> Iterable[Point]:
    if (
        row.status is Status.OK
        and row.metrics.get("speedup", 0.0) > 0
        and row.baseline not in (None, "reference")
    ):
        op, us = str(row.subject.op), row.metrics["baseline_us_p50"]
        ours = us / row.metrics["speedup"]  # the paired ratio is more precise than the two times
        made, name = shape(op, row.case.get("dims") or {}), str(row.case.get("name"))
        yield Point(op, str(row.case["dtype"]), made, name, ours, us, str(row.baseline))


def _explained(row: Row) -> Iterable[Point]:
    case, us = row.case, row.case.get("us") or {}
    libraries = {
        provider_times.OURS + n for n in provider_times.LIBRARIES
    }  # library kernels among our providers
    offered = {n: t for n, t in us.items() if not n.startswith(provider_times.OURS) or n in libraries}
    if row.kind == "call" and case.get("timer") == "cuda-graph" and "ours_us" in row.metrics and offered:
        op, dtype, best = str(row.subject.op), str(case["dtype"]), min(offered, key=offered.__getitem__)
        dims = {k: _value(v) for k, v in (case.get("dims") or {}).items()}
        if "seq_lens" in dims:
            dims["seq_lens"] = [case["context"]] * case["batch"]  # its text may have been truncated
        if op in PRODUCTION and dims:
            entry = _entry(op, dtype, dims, str(row.machine.gpu))
            if entry is not None and entry.faster and provider_times.OURS + str(entry.provider) not in us:
                return  # the table has changed since, and its current choice was not timed
        name = f"explain, {case['label']} of {case['batch']}"
        theirs = best.removeprefix(provider_times.OURS)
        yield Point(op, dtype, shape(op, dims), name, row.metrics["ours_us"], offered[best], theirs)


def _layer(mine: Sequence[Row]) -> Iterable[Point]:
    case = mine[0].case
    dims = {k: case[k] for k in ("tokens", "in", "out")}
    yield from _scenario("linear", mine, dims, f"{case['layer']}, {case['tokens']}")


def _attention(mine: Sequence[Row]) -> Iterable[Point]:
    case = mine[0].case
    if mine[0].subject.op == "attention_decode" and case.get("model") == MODEL:
        dims = {"seq_lens": [case["context"]] * case["batch"], **HEADS}
        yield from _scenario("attention_decode", mine, dims, f"{case['batch']} x {case['context']}")


def _scenario(op: str, mine: Sequence[Row], dims: Mapping[str, Any], name: str) -> Iterable[Point]:
    """The points of an experiment; none if its run did not time both sides."""
    times: dict[str, list[tuple[str, float]]] = {}
    for row in mine:
        label = str(row.case.get("params") or "")
        times.setdefault(str(row.subject.provider), []).append((label, row.metrics["us"]))
    theirs = {n: min(us for _, us in times[n]) for n in PRODUCTION[op] if n in times}
    ours = _by_table(op, "bfloat16", dims, str(mine[0].machine.gpu), times)
    if theirs and ours:
        best = min(theirs, key=theirs.__getitem__)
        yield Point(op, "bfloat16", shape(op, dims), name, min(ours), theirs[best], best)


def _by_table(
    op: str, dtype: str, dims: Mapping[str, Any], chip: str, times: Mapping[str, Sequence[tuple[str, float]]]
) -> list[float]:
    """The times, of {provider: [(its parameters, microseconds)]}, of what the chip's shipped table runs for such a
    call: with the same parameters if timed, else all of that provider; production's usual choice without an entry."""
    entry = _entry(op, dtype, dims, chip)
    faster = entry if entry is not None and entry.faster else None
    of = times.get(str(faster.provider) if faster is not None else PRODUCTION[op][0], ())
    chosen = [] if faster is None else list(map(str, faster.params.values()))
    if same := [us for label, us in of if label and label.split("/") == chosen]:
        return same
    # Rows of other dates have more or fewer parameters: those in common must match.
    alike = [
        us
        for label, us in of
        if label and all(a == b for a, b in zip(label.split("/"), chosen, strict=False))
    ]
    return alike or [us for _, us in of]


def _entry(op: str, dtype: str, dims: Mapping[str, Any], chip: str) -> tuning.Entry | None:
    """The entry of the chip's shipped table for such a call."""
    if op == "linear":
        tokens = dims["tokens"]
        sizes = {
            "N": dims["out"],
            "K": dims["in"],
            "M": math.prod(tokens) if isinstance(tokens, tuple) else tokens,
        }
    else:
        sizes = {"window": 0, **dims, "batch": len(dims["seq_lens"]), "context": max(dims["seq_lens"])}
    sizes["dtype"] = getattr(torch, dtype)
    key = registry.get(op).op.key
    return _table(op, chip).find(tuple(sizes[k] for k in key.shape), tuple(sizes[k] for k in key.sizes))


@cache
def _table(op: str, chip: str) -> tuning.Lookup[tuning.Entry]:
    path = tuning.SHIPPED / f"{tuning.slug(chip)}.json"
    found = [e for e in tuning.read(path).entries if e.op == op] if path.is_file() else []
    return tuning.lookup(registry.get(op).op.key, found)
