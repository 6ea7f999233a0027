"""RUN/report.html: one self-contained page made from RUN/rows.jsonl, with the table first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fk_bench.core import rows, stats
from fk_bench.core.rows import Row
from fk_bench.serving import summary
from fk_bench.serving.config import ConfigError, Level
from fk_bench.serving.summary import LaneResult

# (heading, metric, digits) of the table at the top. All latencies are further down the page.
COLUMNS = (
    ("output tok/s", "output_tokens_per_s", 1),
    ("tok/s per GPU", "output_tokens_per_s_per_gpu", 1),
    ("tok/s per user", "tokens_per_s_per_user", 1),
    ("req/s", "requests_per_s", 2),
    ("goodput req/s", "goodput_requests_per_s", 2),
    ("TTFT p50", "ttft_ms_p50", 1),
    ("TTFT p99", "ttft_ms_p99", 1),
    ("TPOT p50", "tpot_ms_p50", 2),
    ("TPOT p99", "tpot_ms_p99", 2),
    ("ITL p99", "itl_ms_p99", 2),
    ("E2EL p50", "e2el_ms_p50", 1),
)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def render(run: Path) -> Path:
    """Write RUN/report.html. Raises ConfigError if there are no rows."""
    file = run / "rows.jsonl"
    if not file.is_file():
        raise ConfigError(f"no such run: {run} (it has no rows.jsonl)")
    found, warnings = rows.read(file)
    if not found:
        raise ConfigError(f"{file} has no result row")
    if found[0].command == "kernels":
        from fk_bench.kernels import report

        return report.render(run, found, warnings)
    path = run / "report.html"
    partial = path.with_suffix(".partial")
    partial.write_text(html(found, warnings))
    partial.replace(path)
    return path


def html(found: list[Row], warnings: list[str]) -> str:
    """The page. All text is escaped; the page loads nothing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from fk_bench.serving import plots

    names = list(dict.fromkeys(r.subject.lane for r in found if r.subject.lane))
    results = summary.lanes(found, names)
    environment = Environment(
        loader=PackageLoader("fk_bench.core"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    levels = sorted({c.level for r in results for c in r.cells}, key=lambda v: v.order)
    columns = [c for c in COLUMNS if any(c[1] in cell.mean for r in results for cell in r.cells)]
    return environment.get_template("report.html").render(
        first=found[0], last=found[-1], case=_case(found), warnings=warnings, columns=[c[0] for c in columns],
        levels=[{"label": _heading(v), "lines": _lines(results, v, columns)} for v in levels],
        lanes=[_lane(r) for r in results], figures=plots.all_figures(results), details=_details(results),
        versions=_versions(results), checked=summary.checked(results),
    )  # fmt: skip


def _case(found: list[Row]) -> dict[str, Any]:
    first = summary.run_case(found)
    return {k: v for k, v in first.items() if k not in ("kind", "load", "value", "num_prompts", "seed")}


def _heading(level: Level) -> str:
    if level.own_lengths:
        return level.label
    return f"{level.label}: {level.input_len} tokens in, {level.output_len} out"


def _base(result: LaneResult) -> str | None:
    return result.agreement.baseline if result.agreement else None


def _lines(
    results: list[LaneResult], level: Level, columns: list[tuple[str, str, int]]
) -> list[dict[str, Any]]:
    lines = []
    for result in results:
        cell = next((c for c in result.cells if c.level == level), None)
        base = next(
            (c for r in results if r.lane == _base(result) for c in r.cells if c.level == level), None
        )
        values = []
        for _, metric, digits in columns:
            value = cell.mean.get(metric) if cell else None
            interval = cell.ci95.get(metric) if cell else None
            text = "" if value is None else f"{value:.{digits}f}"
            half = (
                "" if interval is None or value is None else f"{(interval[1] - interval[0]) / 2:.{digits}f}"
            )
            values.append({"text": text, "half": half})
        ratio = ""
        if cell and base and base is not cell and not _own_kernels(result):
            ratio = _ratio(cell.values("output_tokens_per_s"), base.values("output_tokens_per_s"))
        lines.append({"lane": result.lane, "values": values, "rounds": len(cell.rounds) if cell else 0, "ratio": ratio,
                      "base": _base(result) or ""})  # fmt: skip
    return lines


def _own_kernels(result: LaneResult) -> bool:
    """Whether the lane ran its host's kernels through our ops, so that its speed is no result."""
    return bool(result.row and result.row.case.get("patched_providers"))


def _ratio(mine: list[float], base: list[float]) -> str:
    if not mine or not base:
        return ""
    ratio, interval = stats.bootstrap_ratio(mine, base, paired=len(mine) == len(base))
    return f"{ratio:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def _lane(result: LaneResult) -> dict[str, Any]:
    metrics = {
        **(result.agreement.metrics if result.agreement else {}),
        **(result.row.metrics if result.row else {}),
    }
    case = result.row.case if result.row else {}
    return {
        "lane": result.lane, "status": result.status.value, "problems": result.problems, "base": _base(result),
        "token_agreement": _number(metrics.get("token_agreement"), 4), "case": case,
        "self_agreement": _number(metrics.get("self_agreement"), 4), "ready_s": _number(metrics.get("ready_s"), 1),
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


def _versions(results: list[LaneResult]) -> list[tuple[str, dict[str, str]]]:
    return [(r.lane, r.row.versions) for r in results if r.row and r.row.versions]


def _details(results: list[LaneResult]) -> list[dict[str, Any]]:
    """All latencies: mean and percentiles, with half the interval over rounds."""
    found = []
    for result in results:
        for cell in result.cells:
            for name in LATENCIES:
                keys = [f"{name}_{s}" for s in ("mean", "p50", "p90", "p95", "p99")]
                if keys[0] in cell.mean:
                    numbers = [_with_half(cell.mean[k], cell.ci95.get(k)) for k in keys]
                    found.append(
                        {"lane": result.lane, "at": cell.level.label, "name": name, "numbers": numbers}
                    )
    return found


def _with_half(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:.2f}" + (f" ± {(interval[1] - interval[0]) / 2:.2f}" if interval else "")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
