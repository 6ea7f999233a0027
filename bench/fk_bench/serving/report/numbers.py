"""Derived numbers of a cell: the requests behind a percentile, measured concurrency, what a lane is compared with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fk_bench.core import stats
from fk_bench.core.rows import Row
from fk_bench.serving.config import Level
from fk_bench.serving.lanes import base_of
from fk_bench.serving.summary import Cell, LaneResult, latest

RULE = (
    "A percentile needs enough values in each round that one is expected above it: p90 10 requests, p95 20, p99 100. "
    "Others are left out."
)
_PERCENTILE = re.compile(r"(.+)_p(\d+)$")


def count(metrics: dict[str, float], name: str) -> float:
    """The values in one round behind the distribution of a latency: requests, or gaps between chunks for ITL."""
    done = metrics.get("requests", 0.0) - metrics.get("requests_failed", 0.0)
    if name.startswith("ttft_") and name != "ttft_ms":
        later = metrics.get("requests_later_turns", 0.0)
        return later if name == "ttft_later_turns_ms" else done - later
    if name != "itl_ms":
        return done
    return metrics.get("output_tokens", 0.0) / metrics.get("tokens_per_chunk_mean", 1.0) - done


def mean(cell: Cell | None, metric: str) -> float | None:
    """The mean of a metric over rounds; None if it is missing, or a percentile that the requests do not support."""
    if cell is None or metric not in cell.mean:
        return None
    found = _PERCENTILE.fullmatch(metric)
    if found and any(
        count(m, found[1]) < stats.percentile_needs(int(found[2])) for m in cell.rounds.values()
    ):
        return None
    return cell.mean[metric]


def in_flight(metrics: dict[str, float]) -> float | None:
    """Mean number of requests in flight in a round: the sum of their latencies over its duration (Little's law)."""
    duration, latency = metrics.get("duration_s"), metrics.get("e2el_ms_mean")
    if not duration or latency is None:
        return None
    return (metrics.get("requests", 0.0) - metrics.get("requests_failed", 0.0)) * latency / 1e3 / duration


def mean_in_flight(cell: Cell | None) -> float | None:
    """The mean of `in_flight` over rounds."""
    found = [v for m in cell.rounds.values() if (v := in_flight(m)) is not None] if cell else []
    return sum(found) / len(found) if found else None


def cell_at(result: LaneResult | None, level: Level) -> Cell | None:
    return next((c for c in result.cells if c.level == level), None) if result else None


def baselines(found: Sequence[Row], names: Sequence[str]) -> dict[str, str]:
    """{lane: the lane that it is compared with}: the one in its rows, else by the rule of lanes."""
    chosen = {name: base_of(name, names) for name in names}
    for row in latest(found):
        if row.baseline is not None and row.baseline in names and row.subject.lane in chosen:
            chosen[row.subject.lane] = row.baseline
    return chosen


def in_words(level: Level, measured: Sequence[float] = ()) -> str:
    """'up to 8 requests in flight (6.4 on average), 2048 tokens in and 8 out'.

    measured: the mean number in flight of each lane. It is below the load's at the end of a round, and if a server or
    the client is late.
    """
    many, value, start = "" if level.value == 1 else "s", f"{level.value:g}", f"{level.start or 0:g}"
    most = "" if level.value == 1 else "up to "
    found = " to ".join(dict.fromkeys(f"{v:.1f}" for v in sorted(measured)))
    mean = f" ({found} on average)" if found else ""
    said = {
        "concurrency": f"{most}{value} request{many} in flight{mean}",
        "rate": f"{value} request{many} per second",
        "ramp": f"{start} to {value} requests per second",
        "trace": "arrivals of a trace" + ("" if level.value == 1 else f" at {value} times its speed"),
        "max_concurrency": f"most requests in flight within the SLOs, {start} to {value}",
        "max_rate": f"most requests per second within the SLOs, {start} to {value}",
    }  # fmt: skip
    parts = [said[level.kind]]
    parts += [] if level.own_lengths else [f"{level.input_len} tokens in and {level.output_len} out"]
    parts += [f"{level.turns} turns"] if level.turns else []
    parts += [f"shared prefixes of {level.prefix[0]} tokens"] if level.prefix else []
    return ", ".join(parts)


def own_kernels(result: LaneResult) -> bool:
    """Whether the lane ran its host's kernels through our ops, so that its speed is no result."""
    return bool(result.row and result.row.case.get("patched_providers"))


def case_text(case: dict[str, Any]) -> str:
    """The conditions of a run in one line."""
    return ", ".join(f"{name}: {_case_value(value)}" for name, value in case.items())


def _case_value(value: Any) -> str:
    return ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else str(value)
