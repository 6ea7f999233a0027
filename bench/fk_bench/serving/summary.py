"""From rows to the numbers of tables, plots and the JSON line, so that all of them agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fk_bench.core import stats
from fk_bench.core.rows import Row, Status
from fk_bench.serving.config import Level

FAILURES = (Status.FAILED, Status.DIED, Status.TIMEOUT, Status.INVALID, Status.WRONG)
HIGHER_IS_BETTER = (
    "output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "tokens_per_s_per_user",
    "output_tokens_per_s_per_gpu", "max_rate_within_slo", "max_concurrency_within_slo", "slo_attainment",
    "prefix_cache_hit_rate", "spec_acceptance_rate", "spec_acceptance_length",
)  # fmt: skip


# Key in the case of a row whose server accepts drafts by force
SYNTHETIC = "synthetic_acceptance"


def synthetic_warning(lane: str | None, how: str) -> str:
    """The warning about a lane whose server accepts drafts by force."""
    return (
        f"{lane}: synthetic acceptance of drafts, {how}: its texts are not the model's, and its speed is no result of a"
        " draft model"
    )


def synthetic_warnings(found: Sequence[Row]) -> list[str]:
    """A warning for each lane whose server accepts drafts by force."""
    said = {row.subject.lane: row.case[SYNTHETIC] for row in found if row.case.get(SYNTHETIC)}
    return [synthetic_warning(lane, how) for lane, how in said.items()]


@dataclass
class Cell:
    """One (lane, level): its successful rounds, the mean of every metric over them, and its 95% interval."""

    lane: str
    level: Level
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    mean: dict[str, float] = field(default_factory=dict)
    ci95: dict[str, tuple[float, float]] = field(default_factory=dict)

    def values(self, metric: str) -> list[float]:
        return [m[metric] for _, m in sorted(self.rounds.items()) if metric in m]


@dataclass
class LaneResult:
    """The outcome of a lane: its last 'lane' and 'agreement' rows, and its cells."""

    lane: str
    row: Row | None = None
    agreement: Row | None = None
    cells: list[Cell] = field(default_factory=list)
    problems: list[Row] = field(default_factory=list)

    @property
    def status(self) -> Status:
        return self.problems[0].status if self.problems else Status.OK

    @property
    def reason(self) -> str:
        return self.problems[0].reason if self.problems else ""


# Key in the case of a row with lengths of its own: the run's lengths, [input_len, output_len]. All other rows, and
# older ones, have the run's lengths.
RUN_LENGTHS = "run_lengths"


def level_of(row: Row) -> Level:
    """The level of a 'round' or 'summary' row, equal to the one in the run's options."""
    case = row.case
    own = RUN_LENGTHS in case
    lengths = (int(case["input_len"]), int(case["output_len"])) if own else (None, None)
    return Level.from_case(case, *lengths)


def run_case(rows: Sequence[Row]) -> dict[str, Any]:
    """The case of the first round, with the run's own lengths; {} without a round."""
    case = dict(next((r.case for r in rows if r.kind == "round"), {}))
    if RUN_LENGTHS in case:
        case["input_len"], case["output_len"] = case.pop(RUN_LENGTHS)
    return case


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of every (kind, lane, level, round): a later attempt replaces an earlier one."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        level = level_of(row) if "load" in row.case else None
        key = (row.kind, row.subject.lane, level, row.round)
        found.pop(key, None)
        found[key] = row
    return list(found.values())


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Cells of all successful 'round' rows, in the order of their first row."""
    made: dict[tuple[str, Level], Cell] = {}
    for row in latest(rows):
        if row.kind == "round" and row.status is Status.OK and row.round is not None:
            key = (str(row.subject.lane), level_of(row))
            made.setdefault(key, Cell(*key)).rounds[row.round] = row.metrics
    for cell in made.values():
        for metric in sorted({name for m in cell.rounds.values() for name in m}):
            mean, interval = stats.mean_ci(cell.values(metric))
            cell.mean[metric] = mean
            if interval is not None:
                cell.ci95[metric] = interval
    return list(made.values())


def names(rows: Sequence[Row]) -> list[str]:
    """The lanes of a run in the order of their first rows, each one after its baseline."""
    found = list(dict.fromkeys(r.subject.lane for r in rows if r.subject.lane))
    bases = {r.subject.lane: r.baseline for r in rows if r.baseline in found}
    return list(dict.fromkeys(name for lane in found for name in (bases.get(lane) or lane, lane)))


def lanes(rows: Sequence[Row], names: Sequence[str]) -> list[LaneResult]:
    """One result per lane, in the order of `names`."""
    last, made = latest(rows), cells(rows)
    results = []
    for name in names:
        mine = [r for r in last if r.subject.lane == name]
        result = LaneResult(
            name, cells=sorted((c for c in made if c.lane == name), key=lambda c: c.level.order)
        )
        for row in mine:
            if row.kind == "lane":
                result.row = row
            elif row.kind == "agreement":
                result.agreement = row
        result.problems = [r for r in mine if r.status in FAILURES]
        result.problems.sort(key=lambda r: r.kind != "lane")  # a failure of the server explains the others
        results.append(result)
    return results


def highest(levels: Sequence[Level]) -> Level:
    """The level of the one-line summary: the highest concurrency, else the highest rate; with the run's requests if
    any level has them."""
    return max(
        levels, key=lambda level: (level.plain, level.own_lengths, level.kind == "concurrency", level.value)
    )


def lane_line(result: LaneResult, level: Level) -> dict[str, object]:
    """A lane in the JSON line: numbers at `level`, None where missing."""
    cell = next((c for c in result.cells if c.level == level), None)
    mean = cell.mean if cell else {}
    row = result.row.metrics if result.row else {}
    agree = result.agreement.metrics if result.agreement else {}
    line: dict[str, object] = {"lane": result.lane, "status": result.status.value}
    for name in ("output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50"):
        line[name] = round(mean[name], 3) if name in mean else None
    for name in ("token_agreement", "self_agreement"):
        line[name] = round(agree[name], 4) if name in agree else None
    line["base"] = result.agreement.baseline if result.agreement else None
    for name in ("patched_modules", "patched_calls"):
        line[name] = int(row.get(name, 0))
    if result.reason:
        line["reason"] = result.reason.splitlines()[0]
    return line


def checked(results: Sequence[LaneResult]) -> list[str]:
    """The headline of a run on a CPU: what was checked in each lane, no speeds. [] for a run on a GPU."""
    found = [result for result in results if result.row is not None]
    if not found or any(result.row is not None and result.row.machine.gpus for result in found):
        return []
    return [f"{result.lane}: {'; '.join(_checks(result))}" for result in found]


def _checks(result: LaneResult) -> list[str]:
    if result.problems:
        return [f"{result.status.value}: {result.reason.splitlines()[0] if result.reason else ''}"]
    checks = ["served every request"]
    assert result.row is not None
    ops = result.row.case.get("patched_ops") or {}
    if calls := int(result.row.metrics.get("patched_calls", 0)):
        providers = sorted(set((result.row.case.get("patched_providers") or {}).values()))
        through = f"provider {', '.join(providers)}" if providers else "our own CPU code"
        done = "swap proved by" if result.lane.endswith("+fk") else "ran"
        checks.append(f"{done} {calls:,} calls of {', '.join(sorted(ops))} ({through})")
    agree = result.agreement
    if agree is not None and agree.baseline is not None and agree.baseline != result.lane:
        value = agree.metrics.get("token_agreement")
        checks += [] if value is None else [f"token agreement with {agree.baseline} {value:.3f}"]
    return checks
