"""Runs the parts of a long measurement in parallel, each on its own GPUs and its share of the CPU cores.

A part that fails or exceeds its time limit is reported as failed; parts that need it are left out, and the others run.
"""

from __future__ import annotations

import fnmatch
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fk_bench.core.gpus import Command, cores_of, placed
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.serving.lanes import shell_line
from fk_bench.serving.process import Server

GRACE_S = 60.0  # for a terminated part to stop its children itself
NOTED_S = 10.0  # interval of recording a part's children
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Part:
    """Commands that run in order, each regardless of whether the one before failed.

    gpus     number of GPUs; a part with 0 never waits
    seconds  expected duration, used for scheduling
    after    parts that must succeed first
    last     the part starts after all others: it measures no time, or would hold up those that others wait for
    """

    name: str
    commands: tuple[Command, ...]
    seconds: float
    gpus: int = 1
    after: tuple[str, ...] = ()
    last: bool = False

    @property
    def limit(self) -> float:
        """Default time limit in seconds."""
        return 120 + 2 * self.seconds


class Queue:
    """Parts in starting order: those with several GPUs first, then by the length of their chain of dependents."""

    def __init__(self, parts: Iterable[Part]):
        found = list(parts)
        self.known = {p.name: p for p in found}
        self.well: set[str] = set()
        self.waiting = sorted(found, key=lambda p: (p.last, -p.gpus, -self._ahead(p)))

    def _ahead(self, part: Part) -> float:
        """Seconds of the longest chain of parts that starts with this one."""
        return part.seconds + max(
            (self._ahead(p) for p in self.known.values() if part.name in p.after), default=0
        )

    def next(self, free: int, now: float, busy: Sequence[tuple[float, int]]) -> Part | None:
        """Remove and return the part that starts now, or None.

        busy  (expected end, number of GPUs) of each running part. While a part waits for several GPUs, only parts
              that end before those GPUs are free may start.
        """
        until = math.inf
        for part in self.waiting:
            if not self.well.issuperset(part.after):
                continue
            if part.gpus == 0 or (part.gpus <= free and now + part.seconds <= until):
                self.waiting.remove(part)
                return part
            if part.gpus > free and until == math.inf:
                until = _there(part.gpus - free, busy)
        return None

    def ended(self, part: Part, well: bool) -> list[Part]:
        """Record how a part ended; return the parts that are left out because it failed."""
        if well:
            self.well.add(part.name)
            return []
        gone = [p for p in self.waiting if part.name in p.after]
        self.waiting = [p for p in self.waiting if p not in gone]
        return [*gone, *(q for p in gone for q in self.ended(p, False))]


def _there(gpus: int, busy: Sequence[tuple[float, int]]) -> float:
    """Return the time when so many more GPUs are free."""
    for end, held in sorted(busy):
        gpus -= held
        if gpus <= 0:
            return end
    return math.inf


def chosen(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Return the parts that match these names or patterns ('servers*') and their prerequisites; all without names.
    Raises ConfigError."""
    known = {p.name: p for p in parts}
    if unknown := [n for n in names if not fnmatch.filter(known, n)]:
        raise ConfigError(f"ONLY={','.join(names)}: no part {unknown[0]!r}; parts: {', '.join(known)}")
    more = [found for n in names or known for found in fnmatch.filter(known, n)]
    wanted = set(more)
    while more:
        needed = [a for a in known[more.pop()].after if a not in wanted]
        wanted |= set(needed)
        more += needed
    return [p for p in parts if p.name in wanted]


def done_before(out: Path, parts: Iterable[Part]) -> dict[str, str]:
    """Return {name: note} of the parts that already succeeded in this folder."""
    file, said = out / "logs" / "parts.jsonl", "already done in this folder"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    then = {one["part"]: one.get("commands") for one in found if one["status"] == "ok"}
    same = {p.name: then[p.name] in (None, _listed(p)) for p in parts if p.name in then}
    return {
        name: said if same[name] else f"{said} with another command; choose another OUT to run it"
        for name in same
    }


def _listed(part: Part) -> list[list[str]]:
    return [list(command) for command in part.commands]


def predicted(
    parts: Sequence[Part], gpus: Sequence[str]
) -> tuple[list[tuple[float, Part, list[str]]], float]:
    """Return [(start, part, its GPUs)] by expected durations, and the end of the last. Parts that need more GPUs than
    there are, and their dependents, are left out."""
    queue, now, free = Queue(p for p in parts if p.gpus <= len(gpus)), 0.0, list(gpus)
    running: list[tuple[float, Part, list[str]]] = []
    made: list[tuple[float, Part, list[str]]] = []
    while True:
        while part := queue.next(len(free), now, [(end, p.gpus) for end, p, _ in running]):
            mine, free = free[: part.gpus], free[part.gpus :]
            running.append((now + part.seconds, part, mine))
            made.append((now, part, mine))
        if not running:
            return made, now
        running.sort(key=lambda r: r[0])
        now, part, mine = running.pop(0)
        free = [g for g in gpus if g in free or g in mine]
        queue.ended(part, True)


@dataclass
class _Running:
    part: Part
    gpus: list[str]
    log: Path
    began: float
    limit: float
    todo: list[Command]
    failed: list[str] = field(default_factory=list)
    process: Server | None = None
    told: float | None = None  # time of its termination request
    noted: float = 0.0


class Batch:
    """Runs parts; calls `say` with a line when one starts or ends, and writes logs to OUT/logs.

    gpus   entries of CUDA_VISIBLE_DEVICES
    limit  time limit of every part, in seconds (default: the part's own)
    why    {name: reason} of the parts that failed or were left out
    """

    def __init__(self, parts: Sequence[Part], gpus: Sequence[str], out: Path, cwd: Path, limit: float | None = None,
                 say: Callable[[str], None] = print):  # fmt: skip
        self.free, self.cwd, self.limit, self.say = list(gpus), cwd, limit, say
        self.order, self.cores = list(gpus), cores_of(gpus)
        self.logs = out.absolute() / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.queue = Queue(parts)
        self.failed: list[str] = []
        self.why: dict[str, str] = {}
        self.running: list[_Running] = []
        self.start = time.monotonic()

    def run(self) -> list[str]:
        """Run all parts; return the names of those that failed or were left out. Stops running parts on exit."""
        before = done_before(self.logs.parent, self.queue.waiting)
        for part in list(self.queue.waiting):
            if part.name in before:
                self.queue.waiting.remove(part)
                self.queue.ended(part, True)
                self._line("", part.name, before[part.name])
            elif part.gpus > len(self.order):
                self.queue.waiting.remove(part)
                self._over(part, f"needs {part.gpus} GPUs", LEFT_OUT)
        try:
            while True:
                self._begin()
                if not self.running:
                    return self.failed
                time.sleep(0.1)
                for running in list(self.running):
                    self._look(running)
        finally:
            for running in self.running:
                if running.process is not None:
                    running.process.terminate()
            for running in self.running:
                if running.process is not None:
                    running.process.stop(GRACE_S)

    def _begin(self) -> None:
        now = time.monotonic()
        while part := self.queue.next(
            len(self.free), now, [(max(now, r.began + r.part.seconds), r.part.gpus) for r in self.running]
        ):
            mine, self.free = self.free[: part.gpus], self.free[part.gpus :]
            limit, log = self.limit or part.limit, self.logs / f"{part.name}.log"
            where = f"on GPU {','.join(mine)}" if mine else "without a GPU"
            self._line(
                "begins", part.name, f"{where}, about {part.seconds:.0f} s, {limit:.0f} at most; {log}"
            )
            running = _Running(part, mine, log, now, limit, list(part.commands))
            self.running.append(running)
            self._next_command(running)

    def _next_command(self, running: _Running) -> None:
        env, argv = placed(running.todo.pop(0), running.gpus, self.cores)
        with open(running.log, "a") as file:
            file.write(f"$ {shell_line(env, argv)}\n")
        try:
            running.process = Server(running.part.name, argv, env, self.cwd, running.log, 0)
        except OSError as error:
            running.process = None
            running.failed.append(f"{argv[0]} cannot be started: {error.strerror}")

    def _look(self, running: _Running) -> None:
        """Advance a part whose command has ended; terminate one that exceeded its limit."""
        now, process = time.monotonic(), running.process
        if process is not None and process.alive():
            if now - running.noted > NOTED_S:
                running.noted = now
                process.remember()
            if running.told is None and now - running.began > running.limit:
                running.told = now
                running.todo.clear()
                running.failed.append(f"time limit of {running.limit:.0f} s exceeded")
                process.terminate()
            elif running.told is not None and now - running.told > GRACE_S:
                process.stop(0.0)
            return
        if process is not None:
            process.stop(0.0)  # remaining children
            if process.process.returncode and running.told is None:
                running.failed.append(f"exit status {process.process.returncode}")
        if running.todo:
            self._next_command(running)
            return
        self.running.remove(running)
        self.free = [g for g in self.order if g in self.free or g in running.gpus]
        took = f"after {now - running.began:.0f} s"
        if not running.failed:
            self._line("ends", running.part.name, took)
            self._note(running.part, "ok", now - running.began)
            self.queue.ended(running.part, True)
            return
        last = process.tail(1) if process is not None else ""
        why = f"{'; '.join(running.failed)}, {took}{f': {last}' if last else ''}"
        self._over(running.part, why, "FAILED", now - running.began)

    def _over(self, part: Part, why: str, status: str, seconds: float = 0.0) -> None:
        """Report a part that failed and the parts that are left out because of it."""
        self._line(status, part.name, why)
        self.why[part.name] = why
        for each in [part, *self.queue.ended(part, False)]:
            if each is not part:
                self.why[each.name] = f"{part.name} failed"
                self._line(LEFT_OUT, each.name, self.why[each.name])
            self.failed.append(each.name)
            self._note(each, status if each is part else LEFT_OUT, seconds if each is part else 0.0)

    def _note(self, part: Part, status: str, seconds: float) -> None:
        with open(self.logs / "parts.jsonl", "a") as file:
            line = {
                "part": part.name,
                "status": status,
                "seconds": round(seconds, 1),
                "expected": part.seconds,
                "commands": _listed(part),
            }
            file.write(json.dumps(line) + "\n")

    def _line(self, what: str, name: str, more: str) -> None:
        self.say(f"{time.monotonic() - self.start:5.0f} s  {what:<8}  {name}  {more}")
