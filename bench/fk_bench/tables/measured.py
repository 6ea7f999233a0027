"""Tables of the documents, each from the rows of its files: servers and judged kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fk_bench.core import stats
from fk_bench.core.rows import Row
from fk_bench.explain.tables import Table
from fk_bench.kernels import report as kernels_report
from fk_bench.serving import summary
from fk_bench.serving.config import Level
from fk_bench.serving.lanes import base_of
from fk_bench.serving.summary import HIGHER_IS_BETTER, Cell

Files = Mapping[str, list[Row]]  # name of a row file: its rows
HOSTS = ("vllm", "sglang", "flashinfer", "torch", "triton")
MEDIANS = (
    ("output tokens/s", "output_tokens_per_s"), ("ITL ms", "itl_ms_p50"), ("TPOT ms", "tpot_ms_p50"),
    ("TTFT ms", "ttft_ms_p50"),
)  # fmt: skip
TAILS = (("ITL p99 ms", "itl_ms_p99"), ("TPOT p99 ms", "tpot_ms_p99"), ("TTFT p99 ms", "ttft_ms_p99"))


def flat(files: Files) -> list[Row]:
    return [row for found in files.values() for row in found]


def origin(used: Sequence[Row], files: Files) -> str:
    """Where these rows of the files come from, in a line: GPU, versions, dates, commits, files."""
    machines = [(r.machine.gpus, r.machine.gpu or r.machine.cpu) for r in used]
    chips = dict.fromkeys(f"{n} x {name}" if n > 1 else name for n, name in machines)
    versions = {k: v for r in used for k, v in r.versions.items() if k in HOSTS}
    said = ", ".join(f"{name} {versions[name]}" for name in HOSTS if name in versions)
    dates = sorted({r.time[:10] for r in used})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commits = ", ".join(dict.fromkeys(str(r.commit)[:7] for r in used if r.commit))
    mine = {id(r) for r in used}
    named = _named([name for name, found in files.items() if any(id(r) in mine for r in found)])
    return f"{', '.join(chips)}; {said}; {when}, commit {commits}; {named}"


def _named(names: Sequence[str]) -> str:
    """`2026-11-21-h200-{kernels,servers}`: what names have in common once."""
    dated = re.match(r"\d{4}-\d\d-\d\d-[a-z0-9]+-", names[0])
    first = (
        dated[0]
        if dated is not None and len(names) > 1 and all(n.startswith(dated[0]) for n in names)
        else ""
    )
    return (
        f"`{first}{{{','.join(n[len(first) :] for n in names)}}}`"
        if first
        else ", ".join(f"`{n}`" for n in names)
    )


# -- servers


def servers(files: Files) -> Iterator[Table]:
    """Lanes at each number of requests: throughput and medians, with the paired ratio to the lane beside. Loads of
    other lengths than the run's come last and say theirs: '8 x (2048, 8)'."""
    yield from _servers(files, MEDIANS, "medians of requests")


def servers_tails(files: Files) -> Iterator[Table]:
    """The same with 99th percentiles."""
    yield from _servers(files, TAILS, "99th percentiles of requests")


def _servers(files: Files, metrics: Sequence[tuple[str, str]], what: str) -> Iterator[Table]:
    """A table a file: lanes of two runs are not side by side."""
    for name, found in files.items():
        mine = [r for r in found if r.command == "serve-compare"]
        made = summary.cells(mine)
        if not made:
            continue
        lanes = list(dict.fromkeys(c.lane for c in made))
        beside, lines, last = baselines(mine), [], None
        for cell in sorted(made, key=lambda c: (c.level.order, lanes.index(c.lane))):
            base = next(
                (c for c in made if c.lane == beside.get(cell.lane) != cell.lane and c.level == cell.level),
                None,
            )
            values = [_with_ratio(cell, base, metric) for _, metric in metrics]
            at = "" if cell.level == last else _requests(cell.level)
            lines.append([at, cell.lane, base.lane if base is not None else "", *values])
            last = cell.level
        case = summary.run_case(mine)
        rounds = " or ".join(map(str, sorted({len(c.rounds) for c in made})))
        title = (
            f"{mine[0].subject.model}, {case.get('dtype')}, {_tokens_in(case, made)} tokens in and "
            f"{case.get('output_len')} out, real servers ({origin(mine, {name: found})}). Means over {rounds} "
            f"interleaved rounds of {what}; in brackets how many times better than the lane beside, mean of the "
            "rounds' ratios with its 95% interval:"
        )
        yield title, ["requests", "lane", "beside", *(heading for heading, _ in metrics)], lines


def _tokens_in(case: Mapping[str, Any], made: Iterable[Cell]) -> str:
    """Of a request: '512' of random prompts, else what the run's prompts have, 'a mean of 967'."""
    if case.get("dataset", "random") == "random":
        return str(case.get("input_len"))
    counted = [m for c in made if c.level.own_lengths for m in c.rounds.values() if "prompt_tokens" in m]
    asked = sum(m["requests"] - m["requests_failed"] for m in counted)
    return f"a mean of {sum(m['prompt_tokens'] for m in counted) / asked:.0f}"


def _requests(level: Level) -> str:
    """'8', '4 /s', or '8 x (2048, 8)': in and out, where they are not the run's."""
    load = f"{level.value:g}{'' if level.kind == 'concurrency' else ' /s'}"
    return load if level.own_lengths else f"{load} x ({level.input_len}, {level.output_len})"


def baselines(found: Iterable[Row]) -> dict[str, str]:
    """{lane: the lane that it is compared with}: what the run said, or would have said had it not been ended."""
    found = list(found)
    names = list(dict.fromkeys(str(r.subject.lane) for r in found if r.kind == "round"))
    said = {str(r.subject.lane): r.baseline for r in found if r.kind in ("summary", "agreement")}
    made = {name: said.get(name) or base_of(name, names, None) for name in {*names, *said}}
    return {name: base for name, base in made.items() if base}


def paired(cell: Cell, base: Cell, metric: str) -> tuple[list[float], list[float]]:
    """The metric of both lanes in the rounds that both have."""
    both = [n for n in sorted(cell.rounds) if metric in cell.rounds[n] and metric in base.rounds.get(n, {})]
    return [cell.rounds[n][metric] for n in both], [base.rounds[n][metric] for n in both]


def _with_ratio(cell: Cell, base: Cell | None, metric: str) -> str:
    value = cell.mean.get(metric)
    if value is None:
        return ""
    digits = 0 if value >= 1000 else 1 if value >= 100 or "ttft" in metric else 2
    mine, other = paired(cell, base, metric) if base is not None else ([], [])
    if not mine or not all((*mine, *other)):
        return f"{value:.{digits}f}"
    over = (mine, other) if metric in HIGHER_IS_BETTER else (other, mine)
    ratio, interval = stats.mean_ci([a / b for a, b in zip(*over, strict=True)])
    within = "" if interval is None else f", {interval[0]:.3f} to {interval[1]:.3f}"
    return f"{value:.{digits}f} ({ratio:.3f}{within})"


# -- kernels


def kernels(files: Files) -> Iterator[Table]:
    """The judge's ops: weighted geometric mean, cases, worst and best; two ops a line. An op whose run did not come to
    its end is named above, and left out."""
    found = flat(files)
    cases = kernels_report.latest(found)
    ended = {(r.run_id, r.subject.op) for r in found if r.command == "kernels" and r.kind == "op"}
    whole = [r for r in cases if (r.run_id, r.subject.op) in ended]
    if not whole:
        return
    lines = []
    for score in sorted(kernels_report.scores(whole)[0], key=lambda s: s.op):
        speedups = [
            r.metrics["speedup"] for r in whole if r.subject.op == score.op and "speedup" in r.metrics
        ]
        ends = [f"{end(speedups):.2f}" if speedups else "" for end in (min, max)]
        failed = f", {score.failed} failed" if score.failed else ""
        mean = "" if score.speedup is None else f"{score.speedup:.2f}"
        lines.append([score.op, mean, f"{score.timed}{failed}", *ends])
    half = -(-len(lines) // 2)
    right = [*lines[half:], *[[""] * 5] * (2 * half - len(lines))]
    left: dict[str, int] = {}
    for row in cases:
        if (row.run_id, row.subject.op) not in ended:
            left[str(row.subject.op)] = left.get(str(row.subject.op), 0) + 1
    total = kernels_report.score("all", whole)
    unfinished = ", ".join(f"{op} ({n})" for op, n in sorted(left.items()))
    title = (
        f"Our overrides in the judge ({origin(whole, files)}): {total.timed} cases timed of {total.cases}, "
        f"{total.failed} failed"
        + (f"; left out, cases of runs that did not come to their end: {unfinished}:" if unfinished else ":")
    )
    columns = ["op", "speed-up", "cases", "worst", "best"]
    yield title, [*columns, "", *columns], [[*a, "", *b] for a, b in zip(lines[:half], right, strict=True)]
