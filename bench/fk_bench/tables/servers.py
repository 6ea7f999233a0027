"""Tables of `serve-compare` rows: each lane against its base lane, by model, host and load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fk_bench.core import stats
from fk_bench.core.rows import Row
from fk_bench.explain.tables import Table
from fk_bench.serving import summary
from fk_bench.serving.lanes import base_of
from fk_bench.serving.summary import HIGHER_IS_BETTER, Cell
from fk_bench.tables.origin import PACKAGES, Files, flat, machine, origin

OWN = "fastkernels"  # the lane of our engine
RANKS = ("--tensor-parallel-size", "--tp-size")
TPOT, TTFT, OUTPUT = "tpot_ms_p50", "ttft_ms_p50", "output_tokens_per_s"


@dataclass(frozen=True)
class LaneAndBase:
    """A lane and its base lane at one load, restricted to the rounds that both completed."""

    model: str
    host: str  # of the base lane
    lengths: str  # tokens in and out
    lane: Cell
    base: Cell

    @property
    def requests(self) -> str:
        level = self.lane.level
        return f"{level.value:g}{'' if level.kind == 'concurrency' else ' /s'}"

    def values(self, metric: str) -> tuple[list[float], list[float]]:
        """Return the metric of the lane and of its base, by round."""
        return paired(self.lane, self.base, metric)

    def ratio(self, metric: str) -> tuple[float, tuple[float, float] | None] | None:
        """Return how many times better the lane is than its base, with a 95% interval."""
        mine, other = self.values(metric)
        if not mine or not all((*mine, *other)):
            return None
        over = (mine, other) if metric in HIGHER_IS_BETTER else (other, mine)
        return stats.mean_ci([a / b for a, b in zip(*over, strict=True)])


def paired(cell: Cell, base: Cell, metric: str) -> tuple[list[float], list[float]]:
    """Return the metric of both lanes in the rounds that both have."""
    both = [n for n in sorted(cell.rounds) if metric in cell.rounds[n] and metric in base.rounds.get(n, {})]
    return [cell.rounds[n][metric] for n in both], [base.rounds[n][metric] for n in both]


def runs(files: Files) -> list[list[Row]]:
    """Return the `serve-compare` rows of each run. Lanes of different runs are never compared."""
    by: dict[tuple[str, str], list[Row]] = {}
    for name, found in files.items():
        for row in found:
            if row.command == "serve-compare":
                by.setdefault((name, row.run_id), []).append(row)
    return list(by.values())


def baselines(found: Iterable[Row]) -> dict[str, str]:
    """Return {lane: its base lane}: from the run's summary, or by the default rule if the run was interrupted."""
    found = list(found)
    names = list(dict.fromkeys(str(r.subject.lane) for r in found if r.kind == "round"))
    stated = {str(r.subject.lane): r.baseline for r in found if r.kind in ("summary", "agreement")}
    made = {name: stated.get(name) or base_of(name, names, None) for name in {*names, *stated}}
    return {name: base for name, base in made.items() if base and base != name}


def pairs(files: Files) -> list[LaneAndBase]:
    """Return every lane with its base lane, by run, lane and load."""
    made = []
    for run in runs(files):
        cells, bases, case = summary.cells(run), baselines(run), summary.run_case(run)
        model, lanes = _model(run), list(dict.fromkeys(c.lane for c in cells))
        for cell in sorted(cells, key=lambda c: (lanes.index(c.lane), c.level.order)):
            base = next((c for c in cells if (c.lane, c.level) == (bases.get(cell.lane), cell.level)), None)
            if base is None:
                continue
            level = cell.level
            lengths = f"{level.input_len}, {level.output_len}"
            if level.own_lengths:
                lengths = f"{_prompt_tokens(case, cells)}, {case.get('output_len')}"
            made.append(LaneAndBase(model, PACKAGES.get(base.lane, base.lane), lengths, cell, base))
    return made


def _model(run: Sequence[Row]) -> str:
    """Return a short name of a run's model and its number of GPUs."""
    name = (
        str(run[0].subject.model)
        .replace(" shapes", "")
        .replace(", random weights", "")
        .replace(" with ", ", ")
    )
    commands = [list(map(str, r.case.get("server_command") or ())) for r in run if r.kind == "lane"]
    ranks = {argv[argv.index(o) + 1] for argv in commands for o in RANKS if o in argv} or {"1"}
    return name if ranks == {"1"} else f"{name}, {'/'.join(sorted(ranks))} GPUs"


def _prompt_tokens(case: dict[str, object], cells: Iterable[Cell]) -> str:
    """Return the length of a prompt: '512' of random prompts, else the mean of what was counted, '~967'."""
    if case.get("dataset", "random") == "random":
        return str(case.get("input_len"))
    counted = [m for c in cells if c.level.own_lengths for m in c.rounds.values() if "prompt_tokens" in m]
    answered = sum(m["requests"] - m["requests_failed"] for m in counted)
    return f"~{sum(m['prompt_tokens'] for m in counted) / answered:.0f}"


def patched(files: Files) -> list[LaneAndBase]:
    """Return the patched hosts, each against the same host unpatched."""
    return [p for p in pairs(files) if p.lane.lane == f"{p.base.lane}+fk"]


# -- tables


def hosts(files: Files) -> Iterator[Table]:
    """Each patched host against itself, at the run's own lengths."""
    found = [p for p in patched(files) if p.lane.level.own_lengths]
    columns = [
        "model", "host", "requests", "tokens in, out", "TPOT ms", "patched", "TPOT speedup",
        "output tokens/s speedup", "TTFT speedup",
    ]  # fmt: skip
    lines = [
        [
            p.model, p.host, p.requests, p.lengths, *_means(p, TPOT),
            *(interval(p.ratio(m)) for m in (TPOT, OUTPUT, TTFT)),
        ]
        for p in found
    ]  # fmt: skip
    if lines:
        yield (
            f"Medians of requests, mean over rounds; 95% intervals ({origin(_rows(files), files)}):",
            columns,
            lines,
        )


def tails(files: Files) -> Iterator[Table]:
    """99th percentiles of each patched host against itself."""
    found = [p for p in patched(files) if p.lane.level.own_lengths]
    metrics = ("ttft_ms_p99", "tpot_ms_p99", "itl_ms_p99")
    lines = [
        [p.model, p.host, p.requests, *_means(p, metrics[0]), *(interval(p.ratio(m)) for m in metrics)]
        for p in found
    ]
    columns = ["model", "host", "requests", "TTFT p99 ms", "patched", "TTFT p99", "TPOT p99", "ITL p99"]
    if lines:
        yield (
            f"99th percentiles, speedups with 95% intervals ({origin(_rows(files), files)}):",
            columns,
            lines,
        )


def loads(files: Files) -> Iterator[Table]:
    """Each patched host against itself under loads of other lengths than the run's: long prompts, short answers."""
    found = [p for p in patched(files) if not p.lane.level.own_lengths]
    lines = [
        [
            p.model, p.host, p.requests, p.lengths, *_means(p, OUTPUT),
            *(interval(p.ratio(m)) for m in (OUTPUT, TTFT, "ttft_ms_p99")),
        ]
        for p in found
    ]  # fmt: skip
    columns = [
        "model", "host", "requests", "tokens in, out", "output tokens/s", "patched", "output tokens/s speedup",
        "TTFT speedup", "TTFT p99 speedup",
    ]  # fmt: skip
    if lines:
        yield f"Loads with few output tokens; 95% intervals ({origin(_rows(files), files)}):", columns, lines


def engine(files: Files) -> Iterator[Table]:
    """Our engine against each host."""
    found = [p for p in pairs(files) if p.lane.lane == OWN and p.lane.level.own_lengths]
    lines = [
        [
            p.model, p.host, p.requests, p.lengths, *_means(p, OUTPUT),
            *(interval(p.ratio(m)) for m in (OUTPUT, TPOT, TTFT)),
        ]
        for p in found
    ]  # fmt: skip
    columns = [
        "model", "against", "requests", "tokens in, out", "host, output tokens/s", "our engine",
        "output tokens/s speedup", "TPOT speedup", "TTFT speedup",
    ]  # fmt: skip
    if lines:
        yield (
            f"Medians of requests, mean over rounds; 95% intervals ({origin(_rows(files), files)}):",
            columns,
            lines,
        )


def summary_table(files: Files) -> Iterator[Table]:
    """The README's table: time per token and throughput of one model, by host and number of requests."""
    every = pairs(files)
    found = [p for p in every if p.lane.lane == f"{p.base.lane}+fk" and p.lane.level.own_lengths][:8]
    lines = []
    for p in found:
        ratio = p.ratio(TPOT)
        ours = [q for q in every if (q.lane.lane, q.base, q.lane.level) == (OWN, p.base, p.lane.level)]
        speedup = "" if ratio is None else f"**{ratio[0]:.2f}x**"
        own = _text(ours[0].values(OUTPUT)[0]) if ours else ""
        lines.append([p.host, p.requests, *_means(p, TPOT), speedup, *_means(p, OUTPUT), own])
    columns = [
        "host", "requests", "ms per token", "patched", "speedup", "tokens/s", "patched", "our engine, tokens/s",
    ]  # fmt: skip
    if lines:
        tokens_in, tokens_out = found[0].lengths.split(", ")
        title = (
            f"{found[0].model} shapes with random weights, {tokens_in} tokens in and {tokens_out} out "
            f"({machine([r for r in flat(files) if r.command == 'serve-compare'])}):"
        )
        yield title, columns, lines


def _rows(files: Files) -> list[Row]:
    return [r for r in flat(files) if r.command == "serve-compare" and r.kind == "round"]


def _means(pair: LaneAndBase, metric: str) -> list[str]:
    """Return the metric of the base and of the lane as cells."""
    mine, other = pair.values(metric)
    return [_text(other), _text(mine)]


def _text(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"{mean:.0f}" if mean >= 1000 else f"{mean:.1f}" if mean >= 100 else f"{mean:.2f}"


def interval(ratio: tuple[float, tuple[float, float] | None] | None) -> str:
    """Return a ratio and its 95% interval as a cell: '1.194 (1.192 to 1.195)'."""
    if ratio is None:
        return ""
    mean, ends = ratio
    return f"{mean:.3f}" + ("" if ends is None else f" ({ends[0]:.3f} to {ends[1]:.3f})")
