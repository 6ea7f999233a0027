"""Fit the selection models to measured points, and print their regret on models that they have not seen.

    fit.py ROWS... [--write] [--json regret.json]

ROWS are files of sweep.py; for experts, also of moe_tiles.py (1646bd59).

The regret of a choice is its time over the time of the fastest measured set, less one. Each model in turn
is left out with all shapes that it has, so that a shape of two models is new to both. --write fits to all points and
writes fastkernels/tuned/selection/OP.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import numpy as np
from fk_bench.core.rows import Row, Status, read, stem

from fastkernels.core.tuning import Chip
from fastkernels.overrides.attention.selection import Call as DecodeCall
from fastkernels.overrides.attention.selection import decode_candidates, preferred
from fastkernels.overrides.kit.selection import FOLDER, MOST, Candidate, Model
from fastkernels.overrides.linear.selection import linear_candidates, linear_fp8_candidates
from fastkernels.overrides.moe.cases import MIXTRAL, QWEN3_30B
from fastkernels.overrides.moe.moe_tiles import parsed
from fastkernels.overrides.moe.selection import Call as ExpertsCall
from fastkernels.overrides.moe.selection import candidates as experts_candidates

# As torch describes it: 132 SMs, 6144 bits at 3201 MHz, two a cycle
H200 = Chip("NVIDIA H200", 132, 4.917e12, 50 << 20)
# Sets slower than the best by this share weigh 0.7, slower ones less. Of 0.1 to 1, this suits all three ops.
NEAR = 0.8


def _decode(shape: dict[str, Any], sizes: dict[str, int]) -> tuple[Candidate, ...]:
    heads, kv_heads, head_size, block_size = list(shape.values())[:4]
    return decode_candidates(
        DecodeCall(heads // kv_heads, kv_heads, head_size, block_size, sizes["batch"], sizes["context"]), H200
    )


def _experts(shape: dict[str, Any], sizes: dict[str, int]) -> tuple[Candidate, ...]:
    block = shape.get("block")
    where = (shape[name] for name in ("experts", "here", "topk", "hidden", "intermediate"))
    return experts_candidates(
        ExpertsCall(*where, sizes["tokens"], 2 if block is None else 1, block == 128), H200
    )


# {op: candidates of (values of Key.shape, values of Key.sizes)}
CANDIDATES: dict[str, Callable[[dict[str, Any], dict[str, int]], Iterable[Candidate]]] = {
    "linear": lambda shape, sizes: linear_candidates(sizes["M"], shape["N"], shape["K"], H200),
    "linear_fp8": lambda shape, sizes: linear_fp8_candidates(
        sizes["M"], shape["N"], shape["K"], shape["block"], H200
    ),
    "attention_decode": _decode,
    "fused_experts": _experts,
    "fused_experts_fp8": _experts,
}
EXPERTS = "fused_experts", "fused_experts_fp8"
# Models of moe_tiles.py, and the scales of its kinds of weights
TILED = {"mixtral-8x7b": MIXTRAL, "qwen3-30b": QWEN3_30B}
SCALES: dict[str, dict[str, int]] = {
    "bf16": {},
    "tensor": {"block": 0, "act": 0},
    "block": {"block": 128, "act": 128},
}


class Point(NamedTuple):
    """A call that was measured.

    models   that make it
    times    microseconds of each measured candidate
    offered  those that proposals are made of
    """

    where: str
    models: frozenset[str]
    times: tuple[tuple[Candidate, float], ...]
    offered: tuple[Candidate, ...]

    @property
    def best(self) -> float:
        return min(us for _, us in self.times)


def points(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """Return the measured points of each op, in the order of their rows."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row.status is Status.OK and row.kind == "time" and row.subject.op in CANDIDATES:
            case, metrics = _of_tiles(row) if "tiles" in row.case else (row.case, row.metrics)
            where = row.subject.op, json.dumps({**case["shape"], **case["sizes"]})
            cases[where] = case
            for params, us in metrics.items():
                found[where][_label(row.subject.provider or "", json.loads(params))] = us
    made: dict[str, list[Point]] = defaultdict(list)
    for (op, where), measured in found.items():
        case = cases[op, where]
        times = [
            (c, measured[label])
            for c in CANDIDATES[op](case["shape"], case["sizes"])
            if (label := _label(c.provider, c.params)) in measured
        ]
        if times:
            models = frozenset(name.partition(":")[0] for name in case["models"])
            offered = [c for c, _ in times]
            if op == "attention_decode":
                offered = preferred(offered)
            made[op].append(Point(where, models, tuple(times), tuple(offered)))
    return made


def _of_tiles(row: Row) -> tuple[dict[str, Any], dict[str, float]]:
    """Return case and metrics, as sweep.py writes them, of a row of moe_tiles.py."""
    name, _, kind = row.case["model"].partition("/")
    shape = {**TILED[name], "here": TILED[name]["experts"], **SCALES[kind], "dtype": "bfloat16"}
    tiles = str(row.case["tiles"]).split()
    params = {"gate_up": tiles[0], "down": tiles[-1]} if row.subject.provider == "triton" else {}
    case = {"models": [f"{name}:experts"], "shape": shape, "sizes": {"tokens": row.case["tokens"]}}
    return case, {json.dumps(params): row.metrics["us"]}


def _label(provider: str, params: Any) -> str:
    return f"{provider} {json.dumps(dict(params), sort_keys=True)}"


def least_squares(terms: np.ndarray, us: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return weights >= 0 of the terms for which the logarithms of the sums are nearest to those of the times."""
    found = _not_negative(terms * (weight / us)[:, None], weight)
    for _ in range(3):  # Gauss-Newton
        estimate = terms @ found
        scale = weight / estimate
        found = _not_negative(terms * scale[:, None], scale * estimate * (1 + np.log(us / estimate)))
    return found


def _not_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimizes |a x - b|, by coordinate descent."""
    size = np.maximum(np.linalg.norm(a, axis=0), 1e-12)
    gram, right = (a / size).T @ (a / size), (a / size).T @ b
    x = np.zeros(len(right))
    for _ in range(20_000):
        before = x.copy()
        for i in range(len(x)):
            x[i] = max(x[i] + right[i] - gram[i] @ x, 0.0)
        if np.abs(x - before).max() < 1e-10 * max(np.abs(x).max(), 1e-12):
            break
    return x / size


def fit(op: str, found: Collection[Point], **told: Any) -> Model:
    """Fit the weights of each kind to all its points."""
    kinds: dict[str, list[tuple[tuple[float, ...], float, float]]] = defaultdict(list)
    for point in found:
        for candidate, us in point.times:
            weight = (1 + ((us / point.best - 1) / NEAR) ** 2) ** -0.5
            kinds[candidate.kind].append((candidate.terms, us, weight))
    weights = {}
    for kind, each in sorted(kinds.items()):
        terms, us, weight = (np.array(column, dtype=float) for column in zip(*each, strict=True))
        weights[kind] = tuple(float(f"{w:.4g}") for w in least_squares(terms, us, weight))
    return Model(op, weights, told)


def winners(found: Collection[Point]) -> list[str]:
    """Return the tiles of experts that are the fastest of their block_m at a point: others are not proposed."""
    tiles: dict[str, None] = {}
    for point in found:
        best: dict[int, tuple[float, Candidate]] = {}
        for candidate, us in point.times:
            if candidate.provider == "triton":
                rows = parsed(candidate.params["gate_up"]).block_m
                best[rows] = min(best.get(rows, (us, candidate)), (us, candidate), key=lambda each: each[0])
        tiles |= dict.fromkeys(t for _, c in best.values() for t in c.params.values())
    return sorted(tiles)


def regret(model: Model, point: Point, most: int) -> float:
    """Return by how much the best of the first `most` proposals is slower than the best set."""
    us = {(c.provider, c.kernel): us for c, us in reversed(point.times)}
    chosen = [us[c.provider, c.kernel] for c in model.best(point.offered, most)]
    return min(chosen) / point.best - 1 if chosen else float("inf")


def left_out(op: str, found: list[Point]) -> dict[str, list[tuple[float, float]]]:
    """Return, for each model, the regret of the first proposal and of the best of three at its points, unseen."""
    result = {}
    for name in sorted({m for point in found for m in point.models}):
        model = fit(op, [p for p in found if name not in p.models])
        unseen = [p for p in found if name in p.models]
        result[name] = [(regret(model, p, 1), regret(model, p, MOST)) for p in unseen]
    return result


def summary(of: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Return mean, 95th percentile and maximum in percent, of the first proposal and of the best of three."""
    table = {}
    for name, column in zip(("first", "three"), zip(*of, strict=True), strict=True):
        percent = 100 * np.array(column)
        values = {"mean": percent.mean(), "p95": np.percentile(percent, 95), "most": percent.max()}
        table.update({f"{name}_{what}": round(float(value), 2) for what, value in values.items()})
    return table


def show(op: str, unseen: dict[str, list[tuple[float, float]]], total: dict[str, float], count: int) -> None:
    lines = {**{name: summary(each) for name, each in unseen.items()}, f"{op}, {count} points": total}
    print(
        "| regret in percent, model left out | first: mean | 95% | most | best of three: mean | 95% | most |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, each in lines.items():
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in each.values()) + " |")


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="write the shipped models")
    parser.add_argument("--json", type=Path, help="write the regret of each op here")
    options = parser.parse_args()
    rows = [row for path in options.rows for row in read(path)[0]]
    table = {}
    for op, found in points(rows).items():
        unseen = left_out(op, found)
        table[op] = total = summary(each for several in unseen.values() for each in several)
        show(op, unseen, total, len(found))
        if options.write:
            told = {
                "rows": [stem(path) for path in options.rows], "points": len(found), "chip": H200.name,
                "models": len(unseen), "regret_percent": total,
            }  # fmt: skip
            if op in EXPERTS:
                told["tiles"] = winners(found)
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{op}.json").write_text(fit(op, found, **told).to_json())
    if not table:
        raise SystemExit(
            f"no measured points of {', '.join(CANDIDATES)} in {', '.join(map(str, options.rows))}"
        )
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
