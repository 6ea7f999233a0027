"""The answer of a run: which lane is faster, by how much and how certainly; whether outputs agree; what failed.

The HTML page, the terminal and the line of JSON say the same, because all take it from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from fk_bench.core import stats
from fk_bench.core.rows import Row
from fk_bench.serving.config import Level
from fk_bench.serving.report import numbers
from fk_bench.serving.summary import HIGHER_IS_BETTER, Cell, LaneResult, highest

NAMES = {
    "output_tokens_per_s": "output tokens/s", "ttft_ms_p50": "TTFT p50", "tpot_ms_p50": "TPOT p50",
    "e2el_ms_p50": "E2EL p50", "max_concurrency_within_slo": "requests in flight within the SLOs",
    "max_rate_within_slo": "requests/s within the SLOs",
}  # fmt: skip
MEDIANS = ("output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "e2el_ms_p50")


class LaneOutcome(str, Enum):
    """The conclusion of a 95% interval."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "not significant"
    ONE_ROUND = "one round: no interval"


@dataclass(frozen=True)
class LaneSpeedup:
    """The ratio of a metric to the baseline's at one load, above 1 where the lane is better.

    in_flight: the mean number of requests in flight, of the lane and of the baseline
    """

    metric: str
    level: Level
    ratio: float
    ci95: tuple[float, float] | None
    in_flight: tuple[float, ...] = ()

    @property
    def outcome(self) -> LaneOutcome:
        if self.ci95 is None:
            return LaneOutcome.ONE_ROUND
        return (
            LaneOutcome.FASTER
            if self.ci95[0] > 1
            else LaneOutcome.SLOWER
            if self.ci95[1] < 1
            else LaneOutcome.SAME
        )

    @property
    def interval(self) -> str:
        return "" if self.ci95 is None else f"{self.ci95[0]:.3f} to {self.ci95[1]:.3f}"

    @property
    def wide(self) -> bool:
        """Whether the interval is too wide to show a difference of less than a tenth either way."""
        return self.ci95 is None or self.ci95[1] > 1.2 * self.ci95[0]

    @property
    def at(self) -> str:
        """The load in words."""
        return numbers.in_words(self.level, self.in_flight)

    @property
    def words(self) -> str:
        """'4.5% faster'; the ratio itself where it is large, or where no interval tells."""
        if self.outcome is LaneOutcome.SAME:
            return "inconclusive" if self.wide else "no significant difference"
        if self.outcome is LaneOutcome.ONE_ROUND or not 0.5 < self.ratio < 2:
            return f"{times(self.ratio)} as fast"
        return f"{100 * abs(self.ratio - 1):.1f}% {self.outcome.value}"


@dataclass(frozen=True)
class RunVerdict:
    """A lane against its baseline.

    headline  throughput (E2EL of an open loop, whose throughput is given) at the highest load
    others    median latencies at the same load
    loads     the headline's metric at every load
    excluded  the reason why speeds are not compared
    """

    lane: str
    baseline: str
    headline: LaneSpeedup | None = None
    others: tuple[LaneSpeedup, ...] = ()
    loads: tuple[LaneSpeedup, ...] = ()
    excluded: str = ""

    @property
    def text(self) -> str:
        """The verdict as a sentence."""
        if self.headline is None:
            return f"{self.lane}: speed not compared with {self.baseline}: {self.excluded}"
        one = self.headline
        what = [NAMES.get(one.metric, one.metric), one.at]
        what[1:1] = [f"95% interval {one.interval}"] if one.ci95 else ["one round, no interval"]
        if one.outcome is LaneOutcome.SAME:
            said = f"{one.words}: {self.lane} is {times(one.ratio)} as fast as {self.baseline}"
        else:
            said = f"{self.lane} is {times(one.ratio)} as fast as {self.baseline}"
        return f"{said} ({'; '.join(what)}){self._loads()}"

    def _loads(self) -> str:
        if len(self.loads) < 2:
            return ""
        low, high = min(s.ratio for s in self.loads), max(s.ratio for s in self.loads)
        return f"; {times(low)} to {times(high)} over {self.tally}"

    @property
    def tally(self) -> str:
        """'7 loads: 6 faster, 1 slower'."""
        counts = {o: sum(s.outcome is o for s in self.loads) for o in LaneOutcome}
        parts = [f"{n} {o.value.partition(':')[0]}" for o, n in counts.items() if n]
        return f"{len(self.loads)} loads: {', '.join(parts)}"


@dataclass
class Requests:
    """Measured requests of a run, warm-up excluded, and the problems of its lanes."""

    sent: int = 0
    failed: int = 0
    problems: list[str] = field(default_factory=list)


def times(ratio: float) -> str:
    """'1.060x'; two digits where more would be noise."""
    return f"{ratio:.3f}x" if ratio < 10 else f"{ratio:.1f}x"


def speedup(cell: Cell | None, base: Cell | None, metric: str) -> LaneSpeedup | None:
    """The ratio over the rounds that both have, or None without one. Lanes alternate, so that rounds are pairs."""
    if cell is None or base is None or cell is base:
        return None
    if numbers.mean(cell, metric) is None or numbers.mean(base, metric) is None:
        return None
    both = [r for r in sorted(cell.rounds) if r in base.rounds]
    pairs = [(cell.rounds[r][metric], base.rounds[r][metric]) for r in both
             if metric in cell.rounds[r] and metric in base.rounds[r]]  # fmt: skip
    if not pairs:
        return None
    mine, theirs = zip(*pairs, strict=True)
    above, below = (
        (mine, theirs) if metric in HIGHER_IS_BETTER or metric.startswith("max_") else (theirs, mine)
    )
    ratio, interval = stats.paired_ratio(above, below)
    if not math.isfinite(ratio):
        return None
    flight = [v for c in (cell, base) if (v := numbers.mean_in_flight(c)) is not None]
    return LaneSpeedup(metric, cell.level, ratio, interval, tuple(flight))


def headline_metric(level: Level) -> str:
    """Throughput of a closed loop; latency where arrivals are given, because they give the throughput too; the load
    that a search found."""
    if level.search:
        return f"max_{level.search}_within_slo"
    return "output_tokens_per_s" if level.kind == "concurrency" else "e2el_ms_p50"


def verdicts(results: Sequence[LaneResult], bases: dict[str, str]) -> list[RunVerdict]:
    """One for each lane that is not its own baseline."""
    known = {r.lane: r for r in results}
    found = []
    for result in results:
        base = bases[result.lane]
        if base == result.lane:
            continue
        if numbers.own_kernels(result):
            why = "on a CPU a patched lane runs its host's own kernels, which proves the swap and no speed"
            found.append(RunVerdict(result.lane, base, excluded=why))
            continue
        levels = sorted({c.level for c in result.cells}, key=lambda v: v.order)
        loads = [speedup(numbers.cell_at(result, v), numbers.cell_at(known.get(base), v), headline_metric(v))
                 for v in levels]  # fmt: skip
        compared = tuple(s for s in loads if s is not None)
        if not compared:
            why = "no load was measured on both"
            found.append(RunVerdict(result.lane, base, excluded=why))
            continue
        top = highest([s.level for s in compared])
        headline = next(s for s in compared if s.level == top)
        mine, theirs = numbers.cell_at(result, top), numbers.cell_at(known.get(base), top)
        others = [speedup(mine, theirs, m) for m in MEDIANS if m != headline.metric]
        found.append(
            RunVerdict(result.lane, base, headline, tuple(s for s in others if s is not None), compared)
        )
    return found


def requests(results: Sequence[LaneResult], rounds: Sequence[Row]) -> Requests:
    """The requests in `rounds` (the latest rows of rounds), and a line for each problem of a lane."""
    found = Requests()
    for row in rounds:
        found.sent += int(row.metrics.get("requests", 0))
        found.failed += int(row.metrics.get("requests_failed", 0))
    for result in results:
        for problem in result.problems:
            reason = (problem.reason.strip() or "no reason recorded").splitlines()[0]
            found.problems.append(f"{result.lane}: {problem.status.value}: {reason}")
    return found


def lines(
    results: Sequence[LaneResult], bases: dict[str, str], rounds: Sequence[Row], agreement: bool = True
) -> list[str]:
    """The whole verdict as text: speed, agreement, errors. `summary.checked` has the agreement, too."""
    said = [v.text for v in verdicts(results, bases)]
    for result in results if agreement else ():
        value = result.agreement.metrics.get("token_agreement") if result.agreement else None
        base = result.agreement.baseline if result.agreement else None
        if value is not None and base != result.lane:
            said.append(f"token agreement of {result.lane} with {base}: {value:.3f}")
    counted = requests(results, rounds)
    if counted.sent:
        said.append(f"{counted.failed} of {counted.sent} requests failed")
    return said + counted.problems
