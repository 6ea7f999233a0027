"""Time of a call of each architecture that is called with requests rather than a chat: ours against references.

    architectures.py --out rows.jsonl [--only ptv3,oasis] [--seconds 570]    measure what the file does not have yet
    architectures.py --summary rows.jsonl ...                                the table of docs/models.md of these rows

See README.md. A lane of a model is a process of its own with a time limit: one that fails or hangs costs its own rows
alone. Run the same command again to go on where the time ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

from experiments.architectures import subjects
from experiments.architectures.subjects import POLICIES, Case, Lane, Subject
from experiments.architectures.times import LIMIT as LIMIT_METRIC
from experiments.architectures.times import Times, ended_at, key
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, append, read
from fk_bench.tables import architectures as tables
from fk_bench.tables.architectures import OURS, PATCHED, PLAIN, PREPARED

LIMIT = 150.0  # seconds of a lane
MARGIN = 1.5  # of a limit over the seconds that the lane is known to need
SHORT = 20.0  # with less, no lane is started


@dataclass(frozen=True)
class Job:
    """A lane of a subject."""

    name: str
    subject: Subject
    lane: Lane

    def __str__(self) -> str:
        return f"{self.name}, {self.lane.name}"

    def seconds(self, limit: float) -> float:
        """The limit of this lane, if `limit` is that of one whose time is unknown."""
        needs = subjects.NEEDS.get((self.name, self.lane.name), 0.0)
        return max(limit * self.subject.limit, MARGIN * needs)


def plain_ops() -> str:
    """FASTKERNELS_PROVIDER with PyTorch's code for every op that has such a provider."""
    from fastkernels.core import registry

    chosen = []
    for name in registry.op_names():
        op = registry.get(name).op
        names = [p.name for p in op.providers if "cuda" in p.devices] if op is not None else []
        plain = next((n for n in ("torch", "sdpa", "cublas", "reference") if n in names), None)
        chosen += [f"{name}:{plain}"] if plain else []
    return ",".join(chosen)


def jobs(only: Sequence[str], wave: int, tiny: bool) -> tuple[list[Job], list[str]]:
    """Lanes in the order in which they run, up to a wave, and what is left out since a package is missing."""
    known = subjects.subjects()
    chosen = {name: subjects.small(known[name]) if tiny else known[name] for name in known if name in only}
    lanes = [Job(name, subject, lane) for name, subject in chosen.items() for lane in subject.all_lanes]
    absent = [f"{job} (no {job.lane.needs})" for job in lanes if not job.lane.installed]
    if tiny:
        absent += [f"{job} (needs a GPU)" for job in lanes if job.lane.run == "policies"]
        lanes = [job for job in lanes if job.lane.run != "policies"]
    made = [job for job in lanes if job.lane.installed and job.lane.wave <= wave]
    return sorted(made, key=lambda job: job.lane.wave), absent  # a stable sort


def missing(out: Path, job: Job, limit: float = 0.0) -> list[tuple[Case, str]]:
    """Cases without a row, and the provider of that row.

    A lane that was ended has rows only while `limit`, its seconds today, are not more than those that it had.
    """
    found = read(out)[0] if out.exists() else []
    mine = [r for r in found if r.subject.model == job.name and not 0 < ended_at(r) < limit]
    providers = (OURS, PREPARED) if job.lane.name == OURS and job.subject.prepared else (job.lane.name,)
    return [
        (case, wanted)
        for case in job.subject.cases
        for wanted in providers
        if not any(_is_of(wanted, str(r.subject.provider)) and {**r.case, **case} == r.case for r in mine)
    ]


def _is_of(wanted: str, provider: str) -> bool:
    if wanted in (POLICIES, POLICIES + PATCHED):
        own = provider in (OURS, PREPARED, PLAIN)
        return not own and provider.endswith(PATCHED) == wanted.endswith(PATCHED)
    return provider == wanted


class Child:
    """The process of a lane. It imports what it needs, and waits for `go`: its start costs no time of others."""

    def __init__(self, job: Job, options: argparse.Namespace) -> None:
        self.job = job
        words = [sys.executable, __file__, "--out", str(options.out), "--child", job.name, job.lane.name]
        env = {**os.environ, "FASTKERNELS_PROVIDER": plain_ops()} if job.lane.name == PLAIN else None
        self._process = subprocess.Popen(
            [*words, *(["--tiny"] if options.tiny else [])], env=env, stdin=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def go(self, limit: float) -> int | None:
        """The exit status; None if the process was ended after `limit` seconds."""
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        try:
            stdin.write("go\n")
            stdin.close()
        except OSError:  # it has ended already
            pass
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def child(options: argparse.Namespace) -> int:
    import torch
    from experiments.architectures import patched, references

    from fastkernels.patch import PatchError

    name, wanted = options.child
    subject = subjects.subjects()[name]
    if options.tiny:
        subject = subjects.small(subject)
    lane = next(lane for lane in subject.all_lanes if lane.name == wanted)
    if lane.run == "engine":
        import fastkernels.engine.llm  # noqa: F401
    elif lane.run != "policies":
        import transformers.modeling_utils  # noqa: F401
    if not sys.stdin.readline():
        return 0  # it is not wanted any more
    cuda = torch.cuda.is_available() and not options.tiny
    times = Times(options.out, name, lane.name, subject.dtype, cuda)
    try:
        references.RUNS[lane.run](name, subject, lane, times, options.tiny)
    except (patched.Differs, PatchError) as error:
        times.fail(subject.cases, str(error))
        return 1
    return 0


def run_all(options: argparse.Namespace) -> int:
    end = time.monotonic() + options.seconds
    known = subjects.subjects()
    only = options.only.split(",") if options.only else list(known)
    if unknown := sorted({*only} - {*known}):
        print(f"--only: no architecture {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    found, absent = jobs(only, options.wave, options.tiny)
    waiting = [job for job in found if missing(options.out, job, job.seconds(options.limit))]
    failed, left = 0, list[str]()
    ready: Child | None = None
    try:
        while waiting:
            job = waiting.pop(0)
            now, ready = ready or Child(job, options), None
            whole = job.seconds(options.limit)
            limit = min(whole, end - time.monotonic())
            if limit < SHORT:
                now.end()
                left += [str(other) for other in (job, *waiting)]
                break
            if waiting:
                ready = Child(waiting[0], options)
            began = time.monotonic()
            status = now.go(limit)
            print(f"  {job}: {time.monotonic() - began:.1f} s", flush=True)
            if status is None and limit < whole:  # the next run has more time for it
                left.append(str(job))
            elif status != 0:
                failed += 1
                reason = (
                    f"not done within {limit:.0f} s" if status is None else f"its process ended with {status}"
                )
                note(options.out, job, reason, limit, status is None)
    finally:
        if ready is not None:
            ready.end()
    print(summary(read(options.out)[0] if options.out.exists() else []))
    if absent:
        print(f"left out: {'; '.join(absent)}")
    if left:
        print(f"not measured; run the same command again: {'; '.join(left)}")
    return 1 if failed else 0


def note(out: Path, job: Job, reason: str, limit: float, ended: bool) -> None:
    """Write rows that say why cases of a lane have no time. ended: it was, after `limit` seconds."""
    times = Times(out, job.name, job.lane.name, job.subject.dtype)
    for case, provider in missing(out, job, limit):
        row = times.row(case, provider)
        row.status, row.reason = Status.FAILED, reason
        if ended:
            row.metrics = {LIMIT_METRIC: limit}
        append(out, [row])
    print(f"{job}: {reason}", flush=True)


def summary(rows: Sequence[Row]) -> str:
    """The published table of these rows in Markdown, and the lanes that failed."""
    lines = [tables.HEAD, ["---"] * len(tables.HEAD), *tables.lines_of(rows)[0]]
    measured = {key(r) for r in rows if r.status is Status.OK}
    failed = {key(r): r for r in rows if r.status is Status.FAILED and key(r) not in measured}
    return "\n".join([
        *(f"| {' | '.join(line)} |" for line in lines),
        *(f"failed: {r.subject.model}, {r.subject.provider}: {r.reason}" for r in failed.values()),
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="rows; what they have is not measured again")
    parser.add_argument("--only", help="architectures, comma-separated")
    parser.add_argument("--seconds", type=float, default=570.0, help="of all")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds of a lane; more where it is known to need more"
    )
    parser.add_argument(
        "--wave", type=int, default=subjects.LAST, help="0: ours and the fastest references alone"
    )
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU: tries the script")
    parser.add_argument("--summary", type=Path, nargs="+", help="print the table of these rows")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.summary:
        print(summary([row for path in options.summary for row in read(path)[0]]))
        return 0
    if options.out is None:
        parser.error("give --out or --summary")
    if options.child:
        return child(options)
    if not options.tiny and not machine.machine().gpus:
        parser.error("there is no GPU; --tiny tries the script with small models on the CPU")
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
