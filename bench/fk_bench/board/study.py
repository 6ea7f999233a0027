"""`fk-bench study`: time that kernels should save in a host's step of decoding, and time that they save, from rows.

Predicted: the calls of a step (explain.cost_model), each with the difference between baseline and candidate that the
judge measured at a call's size. Between two judged sizes it is interpolated over the logarithm of the bytes; below the
smallest it is that of the smallest, above the largest it grows with the bytes. Realized: the same host with and without
the set, as `fk-bench eval` measured it. A prediction has no prompts in it and no launches: a host's graph hides those.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from fastkernels.core.registry import UnknownName
from fk_bench.board import submission
from fk_bench.board.submission import SubmissionError
from fk_bench.core.rows import Row, Status
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.text import printable
from fk_bench.evaluate import checkpoints
from fk_bench.evaluate.run import results
from fk_bench.evaluate.run.items import PHASES
from fk_bench.evaluate.suites import Entry, Suite, SuiteError, load
from fk_bench.explain.cost_model import Call, step

FASTER, SLOWER, SAME, WRONG, NOT_RUN = "faster", "slower", "no difference", "wrong", "did not run"
COLUMNS = (
    "set", "model", "host", "sequences", "step, us", "predicted saving, us", "realized saving, us", "of the step",
    "95% interval", "verdict", "kept", "left out",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A set in a host at one number of sequences. Shares are of the step's time without the set.

    step_us     time per token of a sequence, prompts included
    predicted   microseconds of a step; None if no call of the kept ops has a judged time
    timed       share of those calls that have one
    realized    share that the host saves, with its interval; None if the item did not run, or its outputs are wrong
    """

    name: str
    model: str
    host: str
    sequences: int
    verdict: str
    kept: tuple[str, ...]
    left_out: str
    step_us: float | None = None
    predicted: float | None = None
    timed: float = 0.0
    realized: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def realized_us(self) -> float | None:
        return None if self.realized is None or self.step_us is None else self.realized * self.step_us


@dataclass(frozen=True)
class Timed:
    """A judged case: its options, the bytes that it moves, and the microseconds that the candidate saves."""

    options: Mapping[str, Any]
    bytes: float
    saved_us: float


def judged(rows: Iterable[Row]) -> dict[tuple[str, str], list[Timed]]:
    """{(folder of the candidate, op): its right cases with a time against a kernel of production}."""
    found: dict[tuple[str, str], list[Timed]] = {}
    for row in rows:
        m = row.metrics
        if row.command != "kernels" or row.kind != "case" or row.status is not Status.OK or row.provisional:
            continue
        if row.subject.candidate and {"gb_per_s", "time_us_p50", "baseline_us_p50"} <= m.keys():
            key = Path(row.subject.candidate).parent.name, str(row.subject.op)
            moved = m["gb_per_s"] * m["time_us_p50"] * 1e3
            one = Timed(_options(row.case.get("dims", {})), moved, m["baseline_us_p50"] - m["time_us_p50"])
            found.setdefault(key, []).append(one)
    return found


def _options(dims: Mapping[str, Any]) -> dict[str, Any]:
    """The dims that are no sizes, such as whether there is a residual or the kind of an activation."""
    return {k: v for k, v in dims.items() if isinstance(v, bool | str)}


def saved_us(call: Call, cases: Sequence[Timed]) -> float:
    """Microseconds that one call saves. Cases with the call's options count alone, if there are any."""
    options = _options(call.case.dims) if call.case is not None else {}
    alike = [c for c in cases if c.options == options] or list(cases)
    by_size: dict[float, list[float]] = {}
    for c in alike:
        by_size.setdefault(max(c.bytes, 1.0), []).append(c.saved_us)
    points = sorted((size, median(saved)) for size, saved in by_size.items())
    size = max(float(call.bytes), 1.0)
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    if size <= points[0][0]:
        return points[0][1]
    (a, before), (b, after) = next(pair for pair in itertools.pairwise(points) if size <= pair[1][0])
    return before + (after - before) * math.log(size / a) / math.log(b / a)


def predicted(
    calls: Iterable[Call], ops: Iterable[str], cases: Mapping[str, Sequence[Timed]]
) -> tuple[float | None, float]:
    """(microseconds that these ops save in a step, share of their calls that have a judged time)."""
    mine = [c for c in calls if c.op in set(ops)]
    timed = [c for c in mine if cases.get(c.op)]
    if not timed:
        return None, 0.0
    share = sum(c.count for c in timed) / sum(c.count for c in mine)
    return sum(c.count * saved_us(c, cases[c.op]) for c in timed), share


@cache
def _calls(config: str, batch: int, context: int) -> tuple[Call, ...]:
    """The calls of a step of decoding; () for a model without one."""
    from fk_bench.core.hub import ModelError
    from fk_bench.e2e.model_configs import load_config

    with tempfile.TemporaryDirectory(prefix="fk-study-") as folder:
        (Path(folder) / "config.json").write_text(config)
        try:
            return step(folder, load_config(folder)[1], "decode", batch, context).calls
        except (ModelError, ValueError):
            return ()


def calls_of(entry: Entry, sequences: int) -> tuple[Call, ...]:
    """The calls of a step in the middle of the answers of a suite's item."""
    lengths = entry.workload.lengths
    context = round(sum(prompt + answer / 2 for prompt, answer in lengths) / len(lengths))
    return _calls(json.dumps(checkpoints.config_of(entry.model), sort_keys=True), sequences, max(context, 1))


def lines_of(rows: Sequence[Row], suite: Suite, kernels: Mapping[tuple[str, str], list[Timed]]) -> list[Line]:
    """The lines of all sets in hosts that answer text, by the share that they save; those that did not run are last."""
    entries = {e.item: e for e in suite.entries if e.workload.kind == "text" and e.workload.lengths}
    found = []
    for name in dict.fromkeys(str(r.case.get("set")) for r in rows if r.kind == results.ITEM):
        for item, row in results.items_done(rows, name).items():
            if item in entries:
                found += [_line(rows, name, row, entries[item], phase, kernels) for phase in PHASES]
    return sorted(found, key=lambda line: (line.realized is None, -(line.realized or 0.0), line.name))


def _line(
    rows: Sequence[Row], name: str, row: Row, entry: Entry, phase: str,
    kernels: Mapping[tuple[str, str], list[Timed]],
) -> Line:  # fmt: skip
    sequences = entry.workload.latency if phase == "latency" else entry.workload.throughput
    kept = tuple(row.case["kept"])
    left = "; ".join(f"{d['op']}: {d['reason']}" for d in row.case["dropped"])
    left = left or ", ".join(f"{op}: unused" for op in row.case.get("unused", ()))
    head = name, str(row.subject.model), str(row.subject.host), sequences
    speedup = row.metrics.get(f"{phase}_speedup")
    if speedup is None or not kept:
        return Line(*head, NOT_RUN, kept, left or row.reason)
    if results.valid_outcome_of(row) is None:
        return Line(*head, WRONG, kept, left or row.reason)
    low, high = (1 - 1 / s for s in row.ci95.get(f"{phase}_speedup", (speedup, speedup)))
    verdict = FASTER if low > 0 else SLOWER if high < 0 else SAME
    rates = [
        r.metrics["baseline_output_tokens_per_s"]
        for r in rows
        if r.kind == results.ROUND and r.case.get("set") == name and r.case["phase"] == phase
        and results.item_of(r) == entry.item and "baseline_output_tokens_per_s" in r.metrics
    ]  # fmt: skip
    cases = {
        op: kernels.get((name, op)) or kernels.get((name.removesuffix(f"-{op}"), op)) or [] for op in kept
    }
    saving, share = predicted(calls_of(entry, sequences), kept, cases)
    return Line(
        *head, verdict, kept, left, 1e6 * sequences / median(rates) if rates else None, saving, share,
        1 - 1 / speedup, low, high,
    )  # fmt: skip


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's, of predicted and realized savings; None for fewer than three lines, or equal values alone."""
    if len(pairs) < 3:
        return None

    def ranks(values: Sequence[float]) -> list[float]:
        return [(sum(v < x for v in values) + sum(v <= x for v in values) - 1) / 2 for x in values]

    a, b = (ranks([p[i] for p in pairs]) for i in (0, 1))
    middle = (len(pairs) - 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    size = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return both / size if size else None


def _cells(line: Line) -> list[str]:
    def number(value: float | None, text: str) -> str:
        return "-" if value is None else format(value, text)

    interval = "-" if line.low is None or line.high is None else f"{line.low:+.1%} to {line.high:+.1%}"
    return [
        printable(line.name), line.model, line.host, str(line.sequences), number(line.step_us, ".1f"),
        number(line.predicted, "+.1f"), number(line.realized_us, "+.1f"), number(line.realized, "+.1%"), interval,
        line.verdict, ", ".join(line.kept) or "-", printable(line.left_out) or "-",
    ]  # fmt: skip


def page(lines: Sequence[Line]) -> str:
    """The table in Markdown, for a report."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(tuple(c.replace("|", "/") for c in _cells(x)) for x in lines)]
    return "\n".join(f"| {' | '.join(r)} |" for r in rows) + f"\n\n{_counts(lines)}\n"


def _pairs(lines: Iterable[Line]) -> list[tuple[float, float]]:
    return [
        (x.predicted, x.realized_us) for x in lines if x.predicted is not None and x.realized_us is not None
    ]


def _counts(lines: Sequence[Line]) -> str:
    found = rank_correlation(_pairs(lines))
    counts = [f"{sum(x.verdict == v for x in lines)} {v}" for v in (FASTER, SAME, SLOWER, WRONG, NOT_RUN)]
    rank = "" if found is None else f" Rank correlation of predicted and realized savings: {found:.2f}."
    return f"{len(lines)} lines: {', '.join(counts)}.{rank}"


def study_command(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of `fk-bench eval`, or files .jsonl or .jsonl.xz")
    ],
    kernels: Annotated[
        list[Path] | None,
        typer.Option(help="rows of the judge on the same files, in folders named as the sets; repeatable"),
    ] = None,
    suite: Annotated[str, typer.Option(help="the suite of the runs: its name, or a .toml file")] = "default",
    markdown: Annotated[Path | None, typer.Option(help="also write the table to this file")] = None,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """Rank sets by the time that they save in a host's step of decoding, next to the saving that their kernels predict.

    A set NAME, or NAME-OP for one candidate alone, belongs to judged candidates in a folder NAME.
    """
    try:
        chosen = load(suite)
        rows = [r for path in runs for r in submission.read(path).rows]
        timed = judged(r for path in kernels or () for r in submission.read(path).rows)
    except (SubmissionError, SuiteError, UnknownName) as error:
        fail(str(error))
    items = [r for r in rows if r.kind == results.ITEM]
    if other := next((r for r in items if r.case.get("digest") != chosen.digest), None):
        fail(
            f"set {printable(str(other.case.get('set')))} was measured with another suite, {other.case.get('suite')}"
            f" ({other.case.get('digest')}), not {chosen.name} ({chosen.digest}): give it with --suite"
        )
    found = lines_of(rows, chosen, timed)
    if not found:
        fail("no item with text in these rows: give runs of `fk-bench eval` on a model that answers text")
    if markdown is not None:
        try:
            markdown.write_text(page(found), encoding="utf-8")
        except OSError as error:
            fail(f"--markdown {markdown}: {error.strerror}")
    if not json_only:
        table(
            "Predicted and realized savings in a step of decoding", COLUMNS, [_cells(line) for line in found]
        )
        print(_counts(found))
    last_line({
        "command": "study", "ok": True, "rank_correlation": rank_correlation(_pairs(found)),
        "lines": [{**asdict(line), "realized_us": line.realized_us} for line in found],
    })  # fmt: skip
