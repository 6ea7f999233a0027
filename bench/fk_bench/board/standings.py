"""Standings from rows: sets that were measured by one suite on one kind of chip are ranked against each other."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastkernels.core.registry import UnknownName
from fk_bench.board.submission import About, Source, Submitted
from fk_bench.core import rows
from fk_bench.core.rows import Row, Status
from fk_bench.core.scores import FAILED, NOT_RUN, latest
from fk_bench.core.stats import geometric_mean
from fk_bench.core.terminal.text import printable
from fk_bench.evaluate import macro_eval as macro
from fk_bench.evaluate.macro_eval import Item, ItemOutcome, MacroEval, Part, Rules
from fk_bench.evaluate.run import results, selftest
from fk_bench.evaluate.run.fidelity import BOUNDS
from fk_bench.evaluate.suites import SuiteError, load, of_model
from fk_bench.quality.calibration import correctness

KERNELS_ONLY = "kernels only"
MOST_LOG = 50.0  # of a factor that is shown
AGREES = 1e-6  # of a score in a row and the score of its items


@dataclass(frozen=True)
class League:
    """Sets are comparable within one: the suite with its digest, and the chip. gpu: False for a check on a CPU."""

    suite: str
    digest: str
    chip: str
    gpu: bool

    @property
    def slug(self) -> str:
        return slug(f"{self.suite}-{self.digest[:8]}-{self.chip}")

    @property
    def title(self) -> str:
        return f"{self.suite}, {self.chip}"


@dataclass
class Entry:
    """One set in a league: its items by their declaration, its ops, and the cases of its kernels."""

    name: str
    league: League
    about: About | None
    label: Mapping[str, str] = field(default_factory=dict)  # of an agent's run
    items: dict[Item, Row] = field(default_factory=dict)
    ops: list[Row] = field(default_factory=list)
    cases: list[Row] = field(default_factory=list)
    tasks: list[Row] = field(default_factory=list)
    selftest: dict[Item, Row] = field(default_factory=dict)  # of the do-nothing set in the same files of rows
    score: Row | None = None
    sources: tuple[Source, ...] = ()
    first: Row | None = None
    runs: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refused: tuple[str, ...] = ()  # why submit-check refuses it
    macro: MacroEval | None = None
    as_is: MacroEval | None = None
    measured: tuple[float, float] | None = None  # the score's interval by the times of its items

    @property
    def slug(self) -> str:
        return slug(f"{self.name}-{self.league.slug}")

    @property
    def mode(self) -> str:
        return (self.about.mode if self.about is not None else "") or self.label.get("mode", "")

    @property
    def agent(self) -> str:
        return (self.about.agent if self.about is not None else "") or self.label.get("agent", "")

    @property
    def outcomes(self) -> dict[Item, ItemOutcome]:
        return {i: o for i, r in self.items.items() if (o := results.outcome_of(r)) is not None}

    @property
    def kept(self) -> float | None:
        """Share of the candidates that ran, of those that each item has a place for."""
        ran = sum(len(r.case.get("kept", ())) for r in self.items.values())
        lost = sum(
            1 for r in self.items.values() for d in r.case.get("dropped", ()) if d.get("reason") != "unused"
        )
        return ran / (ran + lost) if ran + lost else None

    @property
    def gap(self) -> Mapping[str, float]:
        """Of its items and ops, never of its score row."""
        found = [*self.items.values(), *self.ops]
        return results.gap_of(found, str(found[0].case.get("set"))) if found else {}

    @property
    def cost(self) -> Mapping[str, float]:
        """Tokens, dollars and hours: of submission.toml, or of the agent's tasks."""
        if self.about is not None and (self.about.tokens or self.about.cost_usd or self.about.hours):
            return {"tokens": self.about.tokens, "cost_usd": self.about.cost_usd, "hours": self.about.hours}
        spent = {k: sum(r.metrics.get(k, 0.0) for r in self.tasks) for k in ("tokens", "cost_usd", "seconds")}
        if not self.tasks:
            return {}
        return {"tokens": spent["tokens"], "cost_usd": spent["cost_usd"], "hours": spent["seconds"] / 3600}

    @property
    def without_kernels(self) -> str:
        """A sentence on the tasks of an agent that brought no kernel; '' for none. No case counts them."""
        lost = [r for r in self.tasks if r.case.get("best") is None]
        if not lost:
            return ""
        why = ", ".join(f"{r.subject.op} ({printable(r.reason, 120) or r.status.value})" for r in lost)
        attempts = sum(r.metrics.get("attempts", 0.0) for r in lost)
        return (
            f"{printable(self.name)}: {len(lost)} of {len(self.tasks)} tasks brought no kernel in {attempts:g}"
            f" attempts, and no case counts them: {why}"
        )

    @property
    def speeds(self) -> list[float]:
        """The speedup of each case of its kernels that was to be timed; 0 for a failed one."""
        return [s for r in self.cases if (s := speed(r)) is not None]


@dataclass
class Standing:
    """A league with its entries, best score first. declared: None if the rows do not tell all declared items."""

    league: League
    entries: list[Entry]
    declared: tuple[Item, ...] | None
    categories: tuple[str, ...]
    thresholds: dict[str, dict[str, int]] = field(default_factory=dict)  # {threshold: {entry's name: rank}}
    # {entry's name: the first and the last rank that its times allow}; see `measured`
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "set"


def speed(row: Row) -> float | None:
    """The speedup of a case of a kernel: 0 if it failed, None if it has no time for another reason."""
    if row.status in FAILED:
        return 0.0
    found = row.metrics.get("speedup")
    return None if row.status in NOT_RUN or found is None or row.provisional else found


def fast_p(speeds: Sequence[float], at: float) -> float:
    """The share of cases that are right and more than `at` times as fast as the baseline."""
    return sum(s > at for s in speeds) / len(speeds) if speeds else 0.0


def entries_of(given: Iterable[Submitted]) -> list[Entry]:
    """The sets of all runs; the rows of one set in several runs are one entry of each league."""
    made: dict[tuple[str, League], Entry] = {}
    for one in given:
        for name, found in _sets(one).items():
            _add(made, one, name, found)
    return _with_kernels(list(made.values()))


def _sets(one: Submitted) -> dict[str, list[Row]]:
    """{name of a set: its rows} of a run. A submission names its sets, and folders those of candidates alone."""
    name = one.about.name if one.about is not None else ""
    loops = [r for r in one.rows if r.command == "agent-loop"]
    label = loops[0].case if loops else {}
    suffix = f"-{label['suffix']}" if label.get("suffix") else ""
    file = Path(one.path)
    own_name = file.absolute().parent.name if file.name == "rows.jsonl" else rows.stem(file)
    plain = name or (f"{label['agent']}{suffix}" if loops else own_name or "run")
    found: dict[str, list[Row]] = {}
    several = len({r.case.get("set") for r in one.rows if r.command == "eval"}) > 1
    split = not name and not loops and len({_folder(r) for r in one.rows if _is_kernel(r)}) > 1
    for row in one.rows:
        if row.command == "eval":
            own = str(row.case.get("set"))
            found.setdefault(f"{name}/{own}" if name and several else name or own, []).append(row)
        elif _is_kernel(row) or row.command == "agent-loop":
            found.setdefault((split and _folder(row)) or plain, []).append(row)
    return found


def _is_kernel(row: Row) -> bool:
    """Whether a row is a case of a set: a candidate's, or one of our own overrides, which are a set, too."""
    return (
        row.command == "kernels"
        and row.kind == "case"
        and row.subject.provider in ("candidate", "fastkernels")
    )


def _folder(row: Row) -> str:
    """The name of a candidate's folder; '' for our own overrides."""
    return Path(row.subject.candidate or "").parent.name


def _league(row: Row) -> League:
    chip = row.machine.gpu or row.machine.cpu or "unknown"
    evaluated = row.command == "eval"
    return League(
        str(row.case.get("suite")) if evaluated else KERNELS_ONLY,
        str(row.case.get("digest")) if evaluated else "", chip, row.machine.gpus > 0,
    )  # fmt: skip


def _is_record(row: Row) -> bool:
    return row.command == "eval" and row.kind == results.ITEM and row.case.get("variant") == "record"


def _add(made: dict[tuple[str, League], Entry], one: Submitted, name: str, found: Sequence[Row]) -> None:
    tested = [r for r in one.rows if _is_record(r) and r.case.get("set") == selftest.NAME]
    for row in found:
        evaluated, league = row.command == "eval", _league(row)
        entry = made.get((name, league))
        if entry is None:
            entry = made[name, league] = Entry(name, league, one.about, sources=one.sources, first=row)
        entry.about = entry.about or one.about
        entry.sources = entry.sources or one.sources
        entry.refused = entry.refused or one.refused
        if row.run_id not in entry.runs:
            entry.runs.append(row.run_id)
        if row.command == "agent-loop":
            entry.label = {k: str(row.case.get(k, "")) for k in ("agent", "mode", "suffix")}
            if row.kind == "task":
                entry.tasks.append(row)
        elif not evaluated:
            entry.cases.append(row)
        elif _is_record(row):
            entry.items[results.item_of(row)] = row
        elif row.kind == results.OP:
            entry.ops.append(row)
        elif row.kind == results.SCORE:
            entry.score = row
    for league_entry in (e for (n, _), e in made.items() if n == name):
        league_entry.selftest |= {results.item_of(r): r for r in tested if _league(r) == league_entry.league}
        league_entry.warnings = list(dict.fromkeys([*league_entry.warnings, *one.warnings]))


def _with_kernels(found: list[Entry]) -> list[Entry]:
    """Kernels of a set that was also evaluated on the same chip are part of that entry."""
    kept = []
    for entry in found:
        entry.cases = latest(entry.cases)
        hosts = [e for e in found if (e.name, e.league.chip) == (entry.name, entry.league.chip) and e.items]
        if entry.league.suite == KERNELS_ONLY and hosts:
            for other in hosts:
                other.cases, other.tasks, other.label = entry.cases, entry.tasks, other.label or entry.label
                other.sources = other.sources or entry.sources
                other.runs += [r for r in entry.runs if r not in other.runs]
        else:
            kept.append(entry)
    for entry in kept:
        entry.warnings += filter(None, [entry.without_kernels])
    return [e for e in kept if e.items or e.score is not None or e.cases or e.tasks]


def standings(found: Sequence[Entry]) -> list[Standing]:
    """Entries by league, ranked; leagues with whole models and with GPUs first."""
    made = []
    for league in dict.fromkeys(e.league for e in found):
        mine = [e for e in found if e.league == league]
        declared, categories = _declared(league, mine)
        if declared:
            for entry in mine:
                _score(entry, declared, categories)
        mine.sort(key=lambda e: (-rank_value(e, "score"), e.name))
        standing = Standing(league, mine, declared or None, categories)
        if declared:
            for what, scale in (("half", 0.5), ("double", 2.0)):
                standing.thresholds[what] = _ranks_at(mine, declared, categories, scale)
            for entry in mine:
                entry.measured = measured(entry, declared, categories)
            standing.ranges = _ranges(mine)
        made.append(standing)
    return sorted(made, key=lambda s: (s.league.suite == KERNELS_ONLY, not s.league.gpu, s.league.title))


def _declared(league: League, mine: Sequence[Entry]) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """The declared items of a suite: from the shipped suite of the same digest, or from the rows of complete runs."""
    name, _, model = league.suite.partition(":")
    try:
        suite = load(name)
        suite = of_model(suite, model) if model else suite
        if suite.digest == league.digest:
            return tuple(suite.declared), suite.categories
    except (SuiteError, UnknownName, OSError):
        pass
    items = tuple(dict.fromkeys(i for e in mine for i in e.items))
    counts = {
        int(e.score.metrics["declared"])
        for e in mine
        if e.score is not None and "declared" in e.score.metrics
    }
    if not items or counts - {len(items)}:
        return (), ()
    names = {i.category for i in items}
    names |= {
        c for e in mine if e.score is not None for c in e.score.case.get("parts", {}).get("category", {})
    }
    return items, tuple(sorted(names))


def _score(entry: Entry, declared: Sequence[Item], categories: Sequence[str]) -> None:
    """The score from the items. A score row that says something else is a warning, never used."""
    mine = {i: o for i, o in entry.outcomes.items() if i in set(declared)}
    whole = {i: o for i, o in mine.items() if results.runs_as_is(entry.items[i])}
    entry.macro = macro.macro_eval(declared, mine, categories)
    entry.as_is = macro.macro_eval(declared, whole, categories, draws=0)
    said = None if entry.score is None else entry.score.metrics.get("score")
    if said is not None and not math.isclose(said, entry.macro.overall.score, rel_tol=AGREES, abs_tol=AGREES):
        entry.warnings.append(
            f"its score row says {said:.4f}, its items give {entry.macro.overall.score:.4f}, which is shown"
        )


def selftest_of(standing: Standing, entry: Entry) -> dict[str, str]:
    """The verdict of the do-nothing set for each host of an evaluated set; see selftest.verdicts."""
    items = standing.declared or tuple(entry.items)
    hosts = {i.host for i in entry.items}
    return selftest.verdicts([i for i in items if i.host in hosts], entry.selftest)


def part(entry: Entry) -> Part | None:
    return None if entry.macro is None else entry.macro.overall


def rank_value(entry: Entry, by: str) -> float:
    """Return the figure of a ranking: score, S, C or coverage; of kernels alone the mean speedup of right cases."""
    overall = part(entry)
    if overall is None:
        return kernel_speedup(entry) or 0.0
    return float(
        {"score": overall.score, "S": overall.S or 0.0, "C": overall.C, "coverage": overall.coverage}[by]
    )


def kernel_speedup(entry: Entry) -> float | None:
    """The geometric mean over its kernels' cases with a time; None without one."""
    timed = [s for s in entry.speeds if s > 0]
    return geometric_mean(timed)[0] if timed else None


def _ranks_at(
    mine: Sequence[Entry], declared: Sequence[Item], categories: Sequence[str], scale: float
) -> dict[str, int]:
    """{name: rank} if the bounds of correctness, and with them its threshold, are scaled."""
    scores = {}
    for entry in mine:
        scaled = {
            i: _scaled(entry.items[i], o, scale) for i, o in entry.outcomes.items() if i in set(declared)
        }
        scores[entry.name] = macro.macro_eval(declared, scaled, categories, Rules(), draws=0).overall.score
    order = sorted(scores, key=lambda n: (-scores[n], n))
    return {name: order.index(name) + 1 for name in order}


def measured(entry: Entry, declared: Sequence[Item], categories: Sequence[str]) -> tuple[float, float] | None:
    """The 95% interval of a score by the intervals of its items' speedups alone; None without them.

    The bootstrap's interval shows how much a score depends on single items, and has nothing to say about one item.
    The logarithm of S is a weighted sum of those of the speedups, which are taken as independent.
    """
    overall, rules = part(entry), macro.DEFAULT
    if overall is None:
        return None
    sizes = Counter(i.category for i in declared)
    names = {*categories, *sizes}
    variance, known = 0.0, False
    for item, outcome in entry.outcomes.items():
        found, valid = entry.items[item].ci95, outcome.correctness >= rules.threshold
        if item not in set(declared) or not valid:
            continue  # its part of S is the floor
        for metric, weight in (("throughput_speedup", rules.weight), ("latency_speedup", 1 - rules.weight)):
            low, high = found.get(metric, (0.0, 0.0))
            if 0 < low <= high < math.inf:
                known = True
                half = math.log(high / low) / 2
                variance += (weight * half / (len(names) * sizes[item.category])) ** 2
    if not known:
        return (overall.score, overall.score) if overall.score == 0 else None
    factor = math.exp(min(math.sqrt(variance), MOST_LOG))
    return overall.score / factor, overall.score * factor


def _ranges(mine: Sequence[Entry]) -> dict[str, tuple[int, int]]:
    """Ranks that the intervals of `measured` allow: two sets whose intervals overlap may be in either order."""
    known = {e.name: e.measured for e in mine if e.measured is not None}
    if len(known) < len(mine):
        return {}
    return {
        name: (
            1 + sum(other[0] > high for other in known.values()),
            len(mine) - sum(other[1] < low for other in known.values()),
        )
        for name, (low, high) in known.items()
    }


def _scaled(row: Row, outcome: ItemOutcome, scale: float) -> ItemOutcome:
    m = row.metrics
    if "discrepancy" not in m or "noise" not in m:
        return outcome
    bound = m.get("bound", BOUNDS["images" if "image" in str(row.case.get("category")) else "text"]) * scale
    return replace(outcome, correctness=correctness(m["discrepancy"], m["noise"], min(bound, 1.0)))


def cell(entry: Entry, item: Item) -> tuple[str, str, str]:
    """(state, text, title) of a set on an item, for the heat map."""
    row = entry.items.get(item)
    if row is None:
        return "none", "not run", "this item was not run"
    dropped = "; ".join(
        f"{d['op']}: {d['reason']}" for d in row.case.get("dropped", ()) if d["reason"] != "unused"
    )
    outcome = results.outcome_of(row)
    if outcome is None:
        state = "unused" if row.status is Status.SKIPPED else "failed"
        return state, "unused" if state == "unused" else row.status.value, dropped or row.reason
    text = f"{math.sqrt(outcome.throughput * outcome.latency):.2f}"
    if outcome.correctness < macro.DEFAULT.threshold:
        return "failed", f"{text}, c {outcome.correctness:.2f}", row.reason or "incorrect"
    if not results.runs_as_is(row):
        return "reduced", text, f"without {dropped}"
    return "whole", text, "the whole set runs"


def data(standing: Standing) -> dict[str, Any]:
    """A league for the page's script, which ranks again for other weights and filters."""
    declared = standing.declared or ()
    return {
        "items": [{"category": i.category, "host": i.host, "level": i.level, "model": i.model} for i in declared],
        "categories": list(standing.categories), "threshold": macro.DEFAULT.threshold, "floor": macro.DEFAULT.floor,
        "sets": {
            e.slug: {
                "name": e.name, "mode": e.mode,
                "outcomes": [
                    None if (o := e.outcomes.get(i)) is None else [o.throughput, o.latency, o.correctness]
                    for i in declared
                ],
            }
            for e in standing.entries
        },
    }  # fmt: skip
