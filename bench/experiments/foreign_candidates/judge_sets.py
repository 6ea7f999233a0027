"""How many claims of foreign candidates hold on this chip, at sizes that were held out, and in a compiled host?

Judges each candidate of each set (a subfolder of SETS) on a few cases and as many with other sizes, in short rounds, in
the cage. The static scan is reported, not enforced. The candidate's own process also reports whether its kernel runs in
compiled code, and what new batch sizes compile. All files share the judge's fork server and the process of the
baselines. Each op has its turn before an op's second file has one, and the sets take turns, so that an interrupted run
has something of all. Resumes: what OUT/summary.jsonl has is not judged again. The files without a failed case are
copied to OUT/passing/SET, sets for `fk-bench eval`.

    python judge_sets.py SETS OUT [--device cuda] [--only rms_norm,gelu] [--limit SECONDS] [--no-time] [--part K/N]

--part 0/2 and --part 1/2, each with an OUT and a GPU of its own, judge all files together. Parts with one --share FILE
use one GPU: each leaves it to the others while a candidate's process starts, loads or compiles.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from fk_bench.core.rows import Row, append
from fk_bench.core.stats import geometric_mean
from fk_bench.core.wall_time import PHASES
from fk_bench.evaluate.adapters.foreign_files import digest_of
from fk_bench.evaluate.adapters.published import ABSENT
from fk_bench.evaluate.adapters.sets import SetFile, read_set
from fk_bench.kernels.judge import Options, judge_ops
from fk_bench.kernels.judge.processes.sides import Sides
from fk_bench.kernels.judge.rows.judging import sides_of
from fk_bench.kernels.judge.scan.scan import rejections, scan

from fastkernels.core import candidate


def options(device: str, timed: bool) -> Options:
    """A short run of `fk-bench kernels --quick --deployment --no-scan`, without captured and extreme cases."""
    return Options(
        device=device, cases=("random", "held-out"), most=4, rounds=3, seconds=0.3, hard=1, timeout=180.0,
        op_budget=240.0, scan=False, timed=timed, deployment=True,
    )  # fmt: skip


def judged(file: SetFile, chosen: Options, sides: Sides, rows: Path) -> dict[str, Any]:
    """The verdict on one candidate: statuses of own and held-out cases, the speedup, the scan, seconds by phase."""
    found = judge_ops([file.op], {file.op: file.path}, chosen, lambda row: append(rows, [row]), sides)
    cases = [r for r in found if r.kind == "case"]
    held = [r for r in cases if r.case["source"] == "held-out"]
    of_op = next((r for r in found if r.kind == "op"), found[-1])
    reasons = Counter(
        f"{r.status.value}: {r.reason}"[:160].split("\n")[0] for r in cases if r.status.value != "ok"
    )
    phases: Counter[str] = Counter()
    for r in found:
        phases.update(r.case.get("seconds", {}))
    return {
        "own": dict(Counter(_status(r) for r in cases if r not in held)),
        "held_out": dict(Counter(_status(r) for r in held)),
        "speedups": {r.case["name"]: round(r.metrics["speedup"], 3) for r in cases if "speedup" in r.metrics},
        "speedup": of_op.metrics.get("speedup_geomean"), "ci95": of_op.ci95.get("speedup_geomean"),
        "held_out_speedup": _mean([r.metrics["speedup"] for r in held if "speedup" in r.metrics]),
        "reasons": dict(reasons.most_common(3)), "phases": {k: round(v, 2) for k, v in phases.most_common(6)},
        "scan": [
            why for f in (file.path, *(s for s in candidate.sources(file.path) if s.suffix == ".py"))
            if (why := rejections(scan(f, file.op)))
        ],
        **of_op.case.get("deployment", {"deployed": "unknown", "serving": "unknown"}),
    }  # fmt: skip


def _status(row: Row) -> str:
    """The status of a case; 'absent' if it has an option that the published class does not have."""
    return "absent" if ABSENT in row.reason else str(row.status.value)


def _mean(values: list[float]) -> float | None:
    return geometric_mean(values, [1.0] * len(values), [None] * len(values))[0] if values else None


class Turns:
    """The GPU of several runs, used by one at a time: a lock on a file, which is left in the phases AWAY.

    The first call of a process compiles, too.
    """

    AWAY = ("start", "list cases", "wait: load", "wait: compiled", "wait: deployment")

    def __init__(self, file: IO[str]):
        self._file, self._held, self._first = file, False, False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the GPU in the block, except in its phases AWAY."""
        self._take()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Leave the GPU in a phase that does not use it."""
        away = self._held and (phase in self.AWAY or (phase == "wait: call" and self._first))
        self._first = phase == "wait: load" or (self._first and phase != "wait: call")
        if away:
            self._leave()
        try:
            yield
        finally:
            if away:
                self._take()

    def _take(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._held = True

    def _leave(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._held = False


def table(summary: Path) -> str:
    rows = [json.loads(line) for line in summary.read_text().splitlines()]
    lines = [
        "set      op                     own ok  held-out ok  speedup  scan      under torch.compile / while serving"
    ]
    for r in rows:
        if "declined" in r:
            continue
        own, held = r["own"], r["held_out"]
        ok = [f"{c.get('ok', 0)}/{sum(c.values())}" for c in (own, held)]
        speed = f"{r['speedup']:.2f}" if r.get("speedup") else "-"
        where = f"{r['deployed'] or 'runs'} / {r['serving'] or 'nothing'}"
        scan_of = "rejects" if r["scan"] else "passes"
        lines.append(f"{r['set']:8} {r['op']:22} {ok[0]:>7} {ok[1]:>12} {speed:>8}  {scan_of:8}  {where}")
    declined = Counter(r["set"] for r in rows if "declined" in r)
    return "\n".join([*lines, f"declined: {dict(declined)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=480.0)
    parser.add_argument("--no-time", action="store_true", help="check only: such runs may share a GPU")
    parser.add_argument("--first", default="", help="ops whose files come first")
    parser.add_argument(
        "--part", default="0/1", type=_part, metavar="K/N", help="every N-th file, from the K-th"
    )
    parser.add_argument("--share", type=Path, help="a file that the parts on one GPU name")
    args = parser.parse_args()
    turns = Turns(args.share.open("a")) if args.share else None
    if turns is not None:
        PHASES.around = turns.around
    start, summary = time.perf_counter(), args.out / "summary.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    done = {(r["set"], r.get("op") or r["file"], r.get("digest")) for r in _lines(summary)}
    waiting: list[tuple[str, SetFile, str]] = []
    for folder in sorted(p for p in args.sets.iterdir() if p.is_dir()):
        found = read_set(folder.name, folder, args.out / "adapted" / folder.name)
        for d in found.declined:
            key = (folder.name, str(d.path.relative_to(folder)), None)
            if key not in done:
                _add(summary, {"set": folder.name, "file": key[1], "declined": d.reason})
        for file in found.candidates:
            digest = digest_of({str(i): f for i, f in enumerate([file.path, *candidate.sources(file.path)])})
            if not args.only or file.op in args.only.split(","):
                waiting.append((folder.name, file, digest))
    waiting = in_turns(waiting, args.first.split(","))[args.part]
    # Only now without what is done, so that a part keeps its files.
    waiting = [w for w in waiting if (w[0], w[1].op, w[2]) not in done]
    chosen = options(args.device, args.device == "cuda" and not args.no_time)
    with sides_of(chosen) as sides:
        for number, (name, file, digest) in enumerate(waiting):
            if time.perf_counter() - start > args.limit:
                left = len(waiting) - number
                print(
                    f"time is up, {left} files are left: run the same command again to go on", file=sys.stderr
                )
                break
            begin = time.perf_counter()
            row = {"set": name, "op": file.op, "file": file.source.name, "digest": digest}
            with turns.held() if turns is not None else nullcontext():
                row |= judged(file, chosen, sides, args.out / "rows.jsonl")
            _add(summary, row | {"seconds": round(time.perf_counter() - begin, 1)})
            if passes(row):
                pass_on(file, args.out / "passing" / name)
    if summary.exists():
        print(table(summary))


def in_turns(
    waiting: Sequence[tuple[str, SetFile, str]], first: Sequence[str] = ()
) -> list[tuple[str, SetFile, str]]:
    """One file of each op, then each op's second file, and so on, after all files of the ops in `first`.

    The set that comes first moves on with each op.
    """
    turns = []
    for number, op in enumerate(sorted({file.op for _, file, _ in waiting})):
        mine = sorted((w for w in waiting if w[1].op == op), key=lambda w: w[0])
        start = number % len(mine)
        turns += [
            (op not in first, turn, number, one) for turn, one in enumerate(mine[start:] + mine[:start])
        ]
    return [one for *_, one in sorted(turns, key=lambda t: t[:3])]


def _part(text: str) -> slice:
    try:
        number, of = (int(n) for n in text.split("/"))
        if 0 <= number < of:
            return slice(number, None, of)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: give K/N with 0 <= K < N, such as 0/2")


def passes(row: dict[str, Any]) -> bool:
    """Whether each case that a file has an option for, own and held-out, is right."""
    counts = Counter(row.get("own", {})) + Counter(row.get("held_out", {}))
    return bool(counts["ok"]) and set(+counts) <= {"ok", "skipped", "absent"}


def pass_on(file: SetFile, folder: Path) -> None:
    """Copy an adapted file with its sources."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(file.path, folder / file.path.name)
    if (own := candidate.sources_folder(file.path)).is_dir():
        shutil.copytree(own, folder / own.name, dirs_exist_ok=True)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _add(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row)[:300], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
