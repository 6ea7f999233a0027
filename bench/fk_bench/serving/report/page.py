"""RUN/report.html: one self-contained page made from RUN/rows.jsonl, with the verdict first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fk_bench.core import pages, rows
from fk_bench.core.rows import Row, Status
from fk_bench.core.runs import missing
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.serving import summary
from fk_bench.serving.config import Level
from fk_bench.serving.report import csv_file, numbers, requests, verdict
from fk_bench.serving.report.verdict import LaneOutcome, LaneSpeedup, RunVerdict
from fk_bench.serving.summary import LaneResult


@dataclass(frozen=True)
class Column:
    """A metric of the results' table; `compared` ones get a column with the speedup."""

    heading: str
    metric: str
    digits: int
    tip: str
    compared: bool = False


# The table of results. The other latencies are in their own tab.
COLUMNS = (
    Column("max in flight", "max_concurrency_within_slo", 0, "Most requests in flight that met the SLOs", True),
    Column("max req/s", "max_rate_within_slo", 2, "Most requests per second that met the SLOs", True),
    Column("output tok/s", "output_tokens_per_s", 1, "Tokens of completed requests over the time of the round", True),
    Column("TTFT p50", "ttft_ms_p50", 1, "Time to first token: from sending a request to its first chunk, ms", True),
    Column("TPOT p50", "tpot_ms_p50", 2, "Time per output token after the first: (E2EL - TTFT) / (n - 1), ms", True),
    Column("E2EL p50", "e2el_ms_p50", 1, "End-to-end latency: from sending a request to its last chunk, ms", True),
    Column("goodput req/s", "goodput_requests_per_s", 2, "Requests per second that met every limit of --slo", True),
    Column("tok/s per user", "tokens_per_s_per_user", 1, "1 / TPOT, mean over requests"),
)  # fmt: skip
IN_FLIGHT = "Measured concurrency: mean number of requests in flight, from their latencies (Little's law)"
LATENCIES = {
    "ttft_ms": "TTFT",
    "ttft_first_turn_ms": "TTFT, first turn",
    "ttft_later_turns_ms": "TTFT, later turns",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2el_ms": "E2EL",
}
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
# Of a round's case: named elsewhere, or different from round to round
_NOT_SHOWN = (
    "kind",
    "load",
    "value",
    "num_prompts",
    "seed",
    "own",
    "warning",
    "flushed_by",
    "cached_tokens_from",
    "probes",
)
CSS = {
    LaneOutcome.FASTER: "good",
    LaneOutcome.SLOWER: "bad",
    LaneOutcome.SAME: "soft",
    LaneOutcome.ONE_ROUND: "soft",
}


def render(run: Path) -> Path:
    """Write RUN/report.html and RUN/results.csv. Raises ConfigError if the run has no rows of kernels or servers."""
    file = run / "rows.jsonl"
    if not file.is_file():
        raise ConfigError(missing(run))
    found, warnings = rows.read(file)
    if not found:
        raise ConfigError(f"{file} has no result row")
    if found[0].command == "kernels":
        from fk_bench.kernels import report

        return report.render(run, found, warnings)
    if found[0].command != "serve-compare":
        raise ConfigError(
            f"{file} has rows of {found[0].command!r}; pages are made of kernels and serve-compare"
        )
    path = run / "report.html"
    partial = path.with_suffix(".partial")
    partial.write_text(html(found, warnings, run))
    partial.replace(path)
    csv_file.write(run / csv_file.NAME, found)
    return path


def html(found: list[Row], warnings: list[str], run: Path | None = None) -> str:
    """The page. Requests by outcome are complete only with the run's folder."""
    from fk_bench.serving.report import plots

    names = summary.names(found)
    results, bases = summary.lanes(found, names), numbers.baselines(found, names)
    levels = sorted({c.level for r in results for c in r.cells}, key=lambda v: v.order)
    told = [t for t in TOLD if any(t[1] in cell.mean for r in results for cell in r.cells)]
    counted = requests.outcomes(found, run)
    first = found[0]
    return pages.render(
        "report.html",
        title=pages.model_name(first.subject.model), lane_names=names, first=first, when=pages.period(found),
        case=numbers.case_text(_case(found)), warnings=[*warnings, *_warnings(found)], on_cpu=not first.machine.gpus,
        own_kernels=any(numbers.own_kernels(result) for result in results),
        checked=summary.checked(results),
        speeds=[_speed_card(v) for v in verdict.verdicts(results, bases)],
        agreement=_agreement_card(results), errors=_errors_card(results, found), cached=_cached(found),
        compared=any(base != lane for lane, base in bases.items()), in_flight_tip=IN_FLIGHT, rule=numbers.RULE,
        levels=[_level(results, bases, v, counted) for v in levels],
        lanes=[_lane(r, bases[r.lane]) for r in results], figures=plots.all_figures(results, counted),
        statistics=STATISTICS, details=_details(results, bases), counted=[_outcomes(o, results, told) for o in counted],
        told=[heading for heading, _, _ in told],
        failures=[(o.lane, o.level.label, text, n) for o in counted for text, n in o.errors.most_common()],
        versions=[(r.lane, r.row.versions) for r in results if r.row and r.row.versions],
    )  # fmt: skip


def _case(found: Sequence[Row]) -> dict[str, Any]:
    first = summary.run_case(found)
    return {k: v for k, v in first.items() if k not in _NOT_SHOWN}


# -- cards


def _speed_card(one: RunVerdict) -> dict[str, Any]:
    """A lane against its baseline: a large ratio, its interval, and the other metrics and loads in small."""
    card: dict[str, Any] = {
        "lane": one.lane,
        "base": one.baseline,
        "excluded": one.excluded,
        "text": one.text,
    }
    if (head := one.headline) is None:
        return {**card, "big": "not compared", "css": "soft", "outcome": ""}
    card |= {
        "big": head.words, "css": CSS[head.outcome], "ratio": verdict.times(head.ratio),
        "outcome": head.outcome.value if head.outcome is LaneOutcome.ONE_ROUND else "", "wide": head.wide,
        "what": verdict.NAMES.get(head.metric, head.metric), "interval": head.interval,
        "at": head.at,
        "others": [{"name": verdict.NAMES[s.metric], **_ratio(s)} for s in one.others],
    }  # fmt: skip
    card["loads"] = ""
    if len(one.loads) > 1:
        low, high = min(s.ratio for s in one.loads), max(s.ratio for s in one.loads)
        card["loads"] = f"{verdict.times(low)} to {verdict.times(high)} over {one.tally}"
    return card


def _agreement_card(results: Sequence[LaneResult]) -> dict[str, Any]:
    """Token agreement of each lane with its baseline; the lowest is the large number."""
    found: list[dict[str, Any]] = []
    for result in results:
        row = result.agreement
        value = row.metrics.get("token_agreement") if row else None
        if row is not None and value is not None and row.baseline != result.lane:
            found.append(
                {
                    "lane": result.lane,
                    "base": row.baseline,
                    "value": value,
                    "wrong": row.status is Status.WRONG,
                }
            )
    if not found:
        return {}
    low = min(f["value"] for f in found)
    return {
        "big": "identical" if low == 1.0 else f"{low:.3f}",
        "css": "bad" if any(f["wrong"] for f in found) else "good" if low == 1.0 else "",
        "lines": [f"{f['lane']} with {f['base']}: {f['value']:.3f}" for f in found],
        "itself": [f"{r.lane} with itself: {r.agreement.metrics['self_agreement']:.3f}" for r in results
                   if r.agreement and "self_agreement" in r.agreement.metrics and r.agreement.baseline == r.lane],
    }  # fmt: skip


def _errors_card(results: Sequence[LaneResult], found: Sequence[Row]) -> dict[str, Any]:
    counted = verdict.requests(results, requests.measured_rounds(found))
    bad = counted.failed or counted.problems
    return {
        "big": f"{counted.failed}",
        "sent": counted.sent,
        "css": "bad" if bad else "good",
        "problems": counted.problems,
        "finished": all(r.row is not None for r in results),
    }


def _cached(found: Sequence[Row]) -> dict[str, Any]:
    """Prompt tokens that servers took from their prefix cache, by lane; {} if none did or none says it."""
    share: dict[str, list[float]] = {}
    for row in requests.measured_rounds(found):
        if "cached_prompt_tokens" in row.metrics:
            both = share.setdefault(str(row.subject.lane), [0.0, 0.0])
            both[0] += row.metrics["cached_prompt_tokens"]
            both[1] += row.metrics.get("prompt_tokens", 0.0)
    bad = any("cache" in str(row.case.get("warning", "")) for row in requests.measured_rounds(found))
    lines = [f"{lane}: {hit:.0f} of {all_:.0f} prompt tokens" for lane, (hit, all_) in share.items() if hit]
    top = max((hit / all_ for hit, all_ in share.values() if all_), default=0.0)
    return {"big": f"{100 * top:.0f}%", "lines": lines, "bad": bad} if lines else {}


def _warnings(found: Sequence[Row]) -> list[str]:
    """The warnings of attached servers, and of rounds, each once for a lane and load."""
    servers = [
        f"{row.subject.lane}: {row.case['warning']}"
        for row in summary.latest(found)
        if row.kind == "lane" and row.case.get("warning")
    ]
    said: dict[tuple[str | None, str], str] = {}
    for row in requests.measured_rounds(found):
        if warning := row.case.get("warning"):
            said.setdefault((row.subject.lane, summary.level_of(row).label), str(warning))
    servers += summary.synthetic_warnings(found)
    return servers + [f"{lane} at {label}: {warning}" for (lane, label), warning in said.items()]


# -- tables


def _ratio(one: LaneSpeedup | None) -> dict[str, str]:
    if one is None:
        return {"ratio": "", "interval": "", "css": "", "outcome": ""}
    return {"ratio": verdict.times(one.ratio), "interval": one.interval, "css": CSS[one.outcome],
            "outcome": one.outcome.value}  # fmt: skip


def _level(
    results: Sequence[LaneResult], bases: dict[str, str], level: Level, counted: Sequence[requests.Outcomes]
) -> dict[str, Any]:  # fmt: skip
    known = {r.lane: r for r in results}
    cells = [cell for r in results if (cell := numbers.cell_at(r, level))]
    columns = [c for c in COLUMNS if any(c.metric in cell.mean for cell in cells)]
    lines = []
    for result in results:
        cell = numbers.cell_at(result, level)
        base = None if numbers.own_kernels(result) else numbers.cell_at(known.get(bases[result.lane]), level)
        values = []
        for column in columns:
            interval = cell.ci95.get(column.metric) if cell else None
            value = numbers.mean(cell, column.metric)
            values.append({**_number(value, interval, column.digits), "column": column,
                           "speedup": _ratio(verdict.speedup(cell, base, column.metric))})  # fmt: skip
        outcome = next((o for o in counted if o.lane == result.lane and o.level == level), None)
        flight = numbers.mean_in_flight(cell)
        lines.append({
            "lane": result.lane, "base": bases[result.lane], "values": values,
            "rounds": len(cell.rounds) if cell else 0,
            "in_flight": "" if flight is None else f"{flight:.1f}",
            "sent": outcome.sent if outcome else 0, "failed": outcome.failed if outcome else 0,
        })  # fmt: skip
    return {"label": level.label, "words": numbers.in_words(level), "columns": columns, "lines": lines}


def _number(value: float | None, interval: tuple[float, float] | None, digits: int) -> dict[str, str]:
    if value is None or not math.isfinite(value):
        return {"text": "", "half": ""}
    half = "" if interval is None else f"{(interval[1] - interval[0]) / 2:.{digits}f}"
    return {"text": f"{value:.{digits}f}", "half": half}


def _details(results: Sequence[LaneResult], bases: dict[str, str]) -> list[dict[str, Any]]:
    """All latencies: mean and percentiles, each with half of its interval and the speedup over the baseline."""
    known = {r.lane: r for r in results}
    found = []
    levels = sorted({c.level for r in results for c in r.cells}, key=lambda v: v.order)
    for level in levels:
        for name, heading in LATENCIES.items():
            for result in results:
                cell = numbers.cell_at(result, level)
                if cell is None or f"{name}_mean" not in cell.mean:
                    continue
                base = (
                    None
                    if numbers.own_kernels(result)
                    else numbers.cell_at(known.get(bases[result.lane]), level)
                )
                values = []
                for s in STATISTICS:
                    metric = f"{name}_{s}"
                    ratio = _ratio(verdict.speedup(cell, base, metric))
                    values.append(
                        {**_number(numbers.mean(cell, metric), cell.ci95.get(metric), 2), "speedup": ratio}
                    )
                line = {"lane": result.lane, "base": bases[result.lane], "at": level.label}
                found.append({**line, "name": heading, "values": values})
    return found


# (heading, metric, digits) that only some servers tell: a column each where a lane has it
TOLD = (
    ("from cache", "cached_prompt_tokens", 0), ("draft acceptance", "spec_acceptance_rate", 3),
    ("tokens per draft", "spec_acceptance_length", 2), ("SLO attainment", "slo_attainment", 3),
    ("lag ms", "lag_ms_mean", 1),
)  # fmt: skip


def _outcomes(
    one: requests.Outcomes, results: Sequence[LaneResult], told: Sequence[tuple[str, str, int]]
) -> dict[str, Any]:
    cell = numbers.cell_at(next((r for r in results if r.lane == one.lane), None), one.level)
    flight = numbers.mean_in_flight(cell)
    return {
        "lane": one.lane, "at": one.level.label, "sent": one.sent, "completed": one.completed, "failed": one.failed,
        "finished": ", ".join(f"{n} {reason}" for reason, n in one.finished.most_common()),
        "rounds": ", ".join(f"{n} {status}" for status, n in one.rounds.items()),
        "in_flight": "" if flight is None else f"{flight:.1f}",
        "requests_per_s": _number(numbers.mean(cell, "requests_per_s"), None, 2)["text"],
        "prompt": _number(numbers.mean(cell, "prompt_tokens"), None, 0)["text"],
        "told": [_number(numbers.mean(cell, metric), None, digits)["text"] for _, metric, digits in told],
        "output": _number(numbers.mean(cell, "output_tokens"), None, 0)["text"],
    }  # fmt: skip


def _lane(result: LaneResult, base: str) -> dict[str, Any]:
    metrics = {
        **(result.agreement.metrics if result.agreement else {}),
        **(result.row.metrics if result.row else {}),
    }
    case = result.row.case if result.row else {}
    return {
        "lane": result.lane, "status": result.status.value, "problems": result.problems, "base": base,
        "token_agreement": _number(metrics.get("token_agreement"), None, 4)["text"], "case": case,
        "self_agreement": _number(metrics.get("self_agreement"), None, 4)["text"],
        "ready_s": _number(metrics.get("ready_s"), None, 1)["text"],
        "patched_modules": int(metrics.get("patched_modules", 0)),
        "patched_calls": int(metrics.get("patched_calls", 0)),
        "patched_ops": case.get("patched_ops") or {}, "notes": case.get("patch_notes") or [],
        "agreement": result.agreement.case if result.agreement else {},
        "agreement_note": result.agreement.reason if result.agreement else "",
        "command": _command(case),
    }  # fmt: skip


def _command(case: dict[str, Any]) -> str:
    from fk_bench.serving.lanes import shell_line

    if case.get("url"):
        return f"attached server at {case['url']}"
    return shell_line(case.get("env") or {}, case["server_command"]) if case.get("server_command") else ""
