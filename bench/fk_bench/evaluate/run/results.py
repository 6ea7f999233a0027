"""Rows of an evaluation, and what follows from them alone: which items are done, and the score."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastkernels.core.candidate import sources
from fk_bench.core.rows import Machine, Row, Status, Subject
from fk_bench.core.stats import geometric_mean
from fk_bench.evaluate.macro_eval import DEFAULT, Item, ItemOutcome, MacroEval, Part, macro_eval
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run import selftest
from fk_bench.evaluate.run.items import PHASES, Measured
from fk_bench.evaluate.suites import Entry, Suite

COMMAND = "eval"
ITEM, ROUND, OP, SCORE = "item", "round", "op", "score"  # case['kind']
PARTS = ("category", "host", "level")  # fields of items by which a score is also given
FIGURES = ("S", "C", "coverage", "score")
PART_COLUMNS = ("part", *FIGURES, "valid")
STATUS = {
    Reason.IMPORT: Status.COMPILE_ERROR, Reason.COMPILE: Status.COMPILE_ERROR, Reason.RUN_TIME: Status.RUNTIME_ERROR,
    Reason.TIME_LIMIT: Status.TIMEOUT, Reason.MEMORY_LIMIT: Status.OOM, Reason.INCORRECT: Status.WRONG,
    Reason.UNSUPPORTED: Status.UNSUPPORTED, Reason.UNUSED: Status.SKIPPED,
    Reason.INSENSITIVE: Status.INVALID,
}  # fmt: skip
COMPARED = ("python", "torch", "triton", "transformers", "timm", "diffusers", "vllm", "sglang", "fastkernels")


@dataclass(frozen=True)
class Context:
    """The part that all rows of a run share; only rows with the same context are one evaluation."""

    run_id: str
    commit: str | None
    machine: Machine
    versions: Mapping[str, str]
    suite: str
    digest: str
    sets: Mapping[str, str]  # {name: digest of its files}

    def row(self, set_name: str, case: Mapping[str, Any], subject: Subject, **more: Any) -> Row:
        shared = {"suite": self.suite, "digest": self.digest, "set": set_name, "files": self.sets[set_name]}
        return Row(
            run_id=self.run_id, commit=self.commit, machine=self.machine, versions=dict(self.versions),
            command=COMMAND, subject=subject.model_copy(update={"candidate": set_name}),
            case={**shared, **case}, **more,
        )  # fmt: skip

    def differs(self, row: Row) -> str:
        """Why a row belongs to another evaluation; '' if it does not."""
        mine: dict[str, Any] = {
            "commit": (row.commit, self.commit),
            "chip": (row.machine.gpu or row.machine.cpu, self.machine.gpu or self.machine.cpu),
            "suite digest": (row.case.get("digest"), self.digest),
        }
        name = str(row.case.get("set"))
        if name in self.sets:
            mine[f"files of the set {name}"] = (row.case.get("files"), self.sets[name])
        for package in COMPARED:
            mine[package] = (row.versions.get(package), self.versions.get(package))
        return next(
            (f"{what}: {old} there, {new} here" for what, (old, new) in mine.items() if old != new), ""
        )


SOURCES = (".py", ".cu", ".cuh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".inl", ".ptx", ".cubin", ".so")


def digest_of(folder: Path, files: Mapping[str, str]) -> str:
    """Of a set: the sources and libraries of its folder, all files of its candidates' own folders, and the files that
    our tools take in their place.
    """
    made = hashlib.sha256(repr(sorted(files)).encode())
    taken = [Path(f) for f in files.values()]
    found = {p for p in folder.rglob("*") if p.suffix in SOURCES and p.is_file()}
    for path in sorted({*found, *taken, *(own for f in taken for own in sources(f))}):
        if "__pycache__" in path.parts:
            continue
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name
        made.update(name.encode(errors="surrogateescape") + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()[:16]


def _item_case(item: Item) -> dict[str, Any]:
    return {k: v for k, v in asdict(item).items() if k not in ("model", "host")}


def item_rows(
    context: Context, name: str, found: Measured, variant: str, extra: Mapping[str, Any]
) -> list[Row]:
    """The rows of an item: one of each round and, last, one of the item. variant: 'record' or 'best'."""
    item, load = found.entry.item, found.entry.workload
    subject = Subject(model=item.model, host=item.host)
    unit = "output_tokens" if load.kind == "text" else "images"
    made = []
    for r in found.rounds:
        metrics = {
            f"{who}_{what}": value
            for who, seconds in r.seconds.items()
            for what, value in (("s", seconds), (f"{unit}_per_s", r.work / seconds))
        }
        case = {"kind": ROUND, "variant": variant, "phase": r.phase, **_item_case(item)}
        made.append(context.row(name, case, subject, round=r.number, metrics=metrics, baseline=item.host))
    case = {
        "kind": ITEM, "variant": variant, **_item_case(item), "kept": list(found.found.kept),
        "unused": list(found.found.unused), "live": found.live, "probes": found.found.probes, **extra,
        "dropped": [{"op": d.op, "reason": d.reason.value, "text": d.text} for d in found.found.dropped],
    }  # fmt: skip
    metrics = {}
    if found.outcome is not None:
        o = found.outcome
        metrics = {
            "throughput_speedup": o.throughput,
            "latency_speedup": o.latency,
            "correctness": o.correctness,
        }
    if found.calibration is not None:
        case["unplanted"] = dict(found.calibration.unplanted)
        metrics |= {f"fault_{name}": d for name, d in found.calibration.faults.items() if math.isfinite(d)}
    if (f := found.fidelity) is not None:
        case["compared"] = f.kind
        metrics |= {"discrepancy": f.discrepancy, "noise": f.noise, "bound": f.bound}
    status = Status.OK if found.reason is None else STATUS.get(found.reason, Status.FAILED)
    made.append(context.row(
        name, case, subject, status=status, reason=found.text, metrics=metrics, baseline=item.host,
        ci95={f"{phase}_speedup": found.ci95[phase] for phase in PHASES if phase in found.ci95},
    ))  # fmt: skip
    return made


def item_of(row: Row) -> Item:
    c = row.case
    return Item(
        c["category"], str(row.subject.model), c["workload"], str(row.subject.host), c["ranks"], c["level"]
    )


def items_done(rows: Iterable[Row], name: str, variant: str = "record") -> dict[Item, Row]:
    """The last row of each item of a set; rounds without it, of an interrupted run, count nothing."""
    return {
        item_of(r): r
        for r in rows
        if r.kind == ITEM and r.case.get("set") == name and r.case.get("variant") == variant
    }


def outcome_of(row: Row) -> ItemOutcome | None:
    m = row.metrics
    if "correctness" not in m:
        return None
    return ItemOutcome(m["throughput_speedup"], m["latency_speedup"], m["correctness"])


def valid_outcome_of(row: Row) -> ItemOutcome | None:
    """The outcome of an item whose outputs are right: the speed of wrong ones is no speed."""
    found = outcome_of(row)
    return None if found is None or found.correctness < DEFAULT.threshold else found


def runs_as_is(row: Row) -> bool:
    """Whether no candidate had to be dropped for the set to run."""
    return all(Reason(d["reason"]).harmless for d in row.case["dropped"])


@dataclass(frozen=True)
class Scores:
    """kept: the score of record; as_is: items in which a candidate was dropped count as not run; best: unranked."""

    kept: MacroEval
    as_is: MacroEval
    best: MacroEval | None


def scores(suite: Suite, rows: Sequence[Row], name: str) -> Scores:
    declared = suite.declared
    done = {i: r for i, r in items_done(rows, name).items() if i in set(declared)}
    outcomes = {i: o for i, r in done.items() if (o := outcome_of(r)) is not None}
    as_is = {i: o for i, o in outcomes.items() if runs_as_is(done[i])}
    better = {i: o for i, r in items_done(rows, name, "best").items() if (o := outcome_of(r)) is not None}
    best = macro_eval(declared, {**outcomes, **better}, suite.categories) if better else None
    return Scores(
        macro_eval(declared, outcomes, suite.categories),
        macro_eval(declared, as_is, suite.categories, draws=0),
        best,
    )


def selftest_of(suite: Suite, rows: Iterable[Row]) -> dict[str, str]:
    """The verdict of the do-nothing set for each host of a suite; see selftest.verdicts."""
    return selftest.verdicts([e.item for e in suite.entries], items_done(rows, selftest.NAME))


def score_row(
    context: Context, name: str, found: Scores, gap: Mapping[str, float], selftests: Mapping[str, str]
) -> Row:
    whole = found.kept.overall
    metrics = {
        "score": whole.score, "S": whole.S or 0.0, "C": whole.C, "coverage": whole.coverage, "declared": whole.declared,
        "valid": whole.valid, "as_is_score": found.as_is.overall.score, **gap,
    }  # fmt: skip
    if whole.S_valid is not None:
        metrics["S_valid"] = whole.S_valid
    if found.best is not None:
        metrics["best_score"] = found.best.overall.score
    case = {"kind": SCORE, "parts": parts_of(found.kept), "selftest": dict(selftests)}
    return context.row(name, case, Subject(), metrics=metrics, ci95=dict(whole.ci95))


def parts_of(found: MacroEval) -> dict[str, dict[str, dict[str, Any]]]:
    """The parts of a score as data: {'category': {'text': {S, C, coverage, score, valid, declared, ci95}}}."""
    return {
        by: {
            value: {
                "S": p.S, "C": p.C, "coverage": p.coverage, "score": p.score, "valid": p.valid,
                "declared": p.declared, "ci95": dict(p.ci95),
            }
            for value, p in found.by[by].items()
        }
        for by in PARTS
    }  # fmt: skip


def part_lines(found: MacroEval) -> list[list[str]]:
    """The parts of a score for people: a line of PART_COLUMNS for each, with intervals."""
    return [
        [f"{by} {value}", *_figures(p), f"{p.valid} of {p.declared}"]
        for by in PARTS
        for value, p in found.by[by].items()
    ]


def _figures(part: Part) -> list[str]:
    """FIGURES with their intervals."""
    values = (part.S or 0.0, part.C, part.coverage, part.score)
    return [
        f"{v:.3f}" + (f" [{part.ci95[k][0]:.3f}, {part.ci95[k][1]:.3f}]" if k in part.ci95 else "")
        for k, v in zip(FIGURES, values, strict=True)
    ]


def score_line(name: str, part: Part) -> str:
    """'mine: score 0.98 = S 1.01 x C 0.99 x coverage 0.98', with intervals."""
    S, C, coverage, score = _figures(part)
    valid = "none" if part.S_valid is None else f"{part.S_valid:.3f}"
    return (
        f"{name}: score {score} = S {S} x C {C} x coverage {coverage}; {part.valid} of {part.declared} items valid,"
        f" S over them {valid}"
    )


def _op_rows(rows: Iterable[Row], name: str, how: str) -> list[Row]:
    """The ops of a set with a speedup that is a score: right ones, timed against a kernel of production."""
    return [
        r
        for r in rows
        if r.kind == OP and r.case.get("set") == name and r.case["how"] == how
        and r.status is Status.OK and "speedup_geomean" in r.metrics and not r.provisional
    ]  # fmt: skip


def gap_of(rows: Sequence[Row], name: str) -> dict[str, float]:
    """The composition gap: speedups of ops alone, of ops on the set's own lower levels, and in the hosts.

    Of the valid items, and of the ops that run in one of them. Without a valid item, there are no hosts and no gap.
    """
    found: dict[str, float] = {}
    valid = {i: r for i, r in items_done(rows, name).items() if valid_outcome_of(r) is not None}
    run = {op for r in valid.values() for op in r.case["kept"]}
    for how in ("independent", "composed"):
        speeds = [
            r.metrics["speedup_geomean"]
            for r in _op_rows(rows, name, how)
            if how == "composed" or not valid or r.subject.op in run
        ]
        if speeds:
            found[f"{how}_speedup"] = geometric_mean(speeds)[0]
    if valid:
        outcomes = [o for r in valid.values() if (o := outcome_of(r)) is not None]
        found["host_speedup"] = geometric_mean([(o.throughput * o.latency) ** 0.5 for o in outcomes])[0]
    if "independent_speedup" in found and "host_speedup" in found:
        found["composition_gap"] = found["host_speedup"] / found["independent_speedup"]
    return found


def production(rows: Sequence[Row], entry: Entry, name: str) -> float | None:
    """Throughput of our engine with the set over that of vLLM without it, for the same model and workload.

    None where our engine is wrong, too.
    """
    done = items_done(rows, name).get(entry.item)
    if entry.item.host != "fastkernels" or done is None or valid_outcome_of(done) is None:
        return None

    def throughput(host: str, who: str) -> float | None:
        key = f"{who}_output_tokens_per_s"
        found = [
            r.metrics[key]
            for r in rows
            if r.kind == ROUND and r.case.get("set") == name and r.case["phase"] == "throughput" and key in r.metrics
            and r.case["workload"] == entry.item.workload
            and (r.subject.model, r.subject.host) == (entry.item.model, host)
        ]  # fmt: skip
        return sorted(found)[len(found) // 2] if found else None

    ours, theirs = throughput("fastkernels", "set"), throughput("vllm", "baseline")
    return ours / theirs if ours and theirs else None


def slower(rows: Sequence[Row], name: str) -> set[str]:
    """Ops of a set that are slower than production by themselves: their whole interval is below 1."""
    return {
        str(r.subject.op)
        for r in _op_rows(rows, name, "independent")
        if r.ci95.get("speedup_geomean", (1.0, 1.0))[1] < 1
    }
