"""Parts of a long measurement, each on GPUs of its own, as many at once as there are GPUs.

Nothing shares a GPU, and each has its share of the CPU cores. A part that fails or takes too long is said to have
failed, what needed it is left out, and the rest runs.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fk_bench.serving.config import ConfigError
from fk_bench.serving.lanes import shell_line
from fk_bench.serving.process import Server

GRACE_S = 60.0  # for a part to end by itself what it started, once it is told to
NOTED_S = 10.0  # between two looks at what a part has started
LEFT_OUT = "left out"

Command = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Commands that run one after the other, all of them, whether the one before failed or not.

    gpus     0: it needs none, and waits for none
    seconds  that it takes, about: what comes first and what goes in between is decided by it
    after    parts that must have ended well before
    last     what is no time: it begins when nothing else can
    """

    name: str
    commands: tuple[Command, ...]
    seconds: float
    gpus: int = 1
    after: tuple[str, ...] = ()
    last: bool = False

    @property
    def limit(self) -> float:
        """Seconds after which it has failed, unless another limit is given."""
        return 120 + 2 * self.seconds


class Queue:
    """Parts in the order in which they begin: those of several GPUs first, then by how long they hold up the rest."""

    def __init__(self, parts: Iterable[Part]):
        found = list(parts)
        self.known = {p.name: p for p in found}
        self.well: set[str] = set()
        self.waiting = sorted(found, key=lambda p: (p.last, -p.gpus, -self._ahead(p)))

    def _ahead(self, part: Part) -> float:
        """Seconds until it and all that needs it have ended, each on GPUs of its own."""
        return part.seconds + max(
            (self._ahead(p) for p in self.known.values() if part.name in p.after), default=0
        )

    def next(self, free: int, now: float, busy: Sequence[tuple[float, int]]) -> Part | None:
        """Take the part that may begin now, if one may.

        busy  of what runs: (when it ends, about; its GPUs). A part that waits for several GPUs is only overtaken by
              what has ended by the time that these are there.
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
        """Note how a part ended; the parts that are left out for it."""
        if well:
            self.well.add(part.name)
            return []
        gone = [p for p in self.waiting if part.name in p.after]
        self.waiting = [p for p in self.waiting if p not in gone]
        return [*gone, *(q for p in gone for q in self.ended(p, False))]


def _there(gpus: int, busy: Sequence[tuple[float, int]]) -> float:
    """When so many more GPUs are free."""
    for end, held in sorted(busy):
        gpus -= held
        if gpus <= 0:
            return end
    return math.inf


def chosen(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """The parts of these names or patterns ('servers*') and those that they need; all, where none is named. Raises
    ConfigError."""
    known = {p.name: p for p in parts}
    if unknown := [n for n in names if not fnmatch.filter(known, n)]:
        raise ConfigError(f"ONLY={','.join(names)}: there is no part {unknown[0]!r} here: {', '.join(known)}")
    more = [found for n in names or known for found in fnmatch.filter(known, n)]
    wanted = set(more)
    while more:
        needed = [a for a in known[more.pop()].after if a not in wanted]
        wanted |= set(needed)
        more += needed
    return [p for p in parts if p.name in wanted]


def done_before(out: Path, parts: Iterable[Part]) -> dict[str, str]:
    """{name: what to say} of the parts that ended well in this folder already."""
    file, said = out / "logs" / "parts.jsonl", "was done before, in this folder"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    then = {one["part"]: one.get("commands") for one in found if one["status"] == "ok"}
    same = {p.name: then[p.name] in (None, _listed(p)) for p in parts if p.name in then}
    return {
        name: said if same[name] else f"{said}, by another command: with another OUT it runs" for name in same
    }


def _listed(part: Part) -> list[list[str]]:
    return [list(command) for command in part.commands]


def predicted(
    parts: Sequence[Part], gpus: Sequence[str]
) -> tuple[list[tuple[float, Part, list[str]]], float]:
    """[(when it begins, part, its GPUs)] if each took what it takes about, and when all have ended. Those that need
    more GPUs than there are, and what needs them, are left out."""
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


def cores_of(gpus: Sequence[str]) -> dict[str, list[int]]:
    """Each GPU's share of the CPU cores that this process may use, neighbours together."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // max(1, len(gpus))
    return {gpu: cores[i * each : (i + 1) * each] for i, gpu in enumerate(gpus)}


def placed(
    command: Command, gpus: Sequence[str], cores: Mapping[str, Sequence[int]]
) -> tuple[dict[str, str], Command]:
    """Environment and command on these GPUs and their cores; on all cores where it has no GPU."""
    mine = [str(core) for gpu in gpus for core in cores[gpu]]
    pinned = ("taskset", "-c", ",".join(mine)) if mine and shutil.which("taskset") else ()
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus) or "-1"}, (*pinned, *command)


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
    told: float | None = None  # when it was told to end
    noted: float = 0.0


class Batch:
    """Runs parts; `say` gets a line as each begins and ends, logs are in OUT/logs.

    gpus   numbers as CUDA_VISIBLE_DEVICES has them
    limit  seconds that any part may take, instead of its own
    why    of each part that failed or was left out, once it has
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
        """All parts; the names of those that failed or were left out. What runs is ended whatever happens."""
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
            running.failed.append(f"{argv[0]} does not run: {error.strerror}")

    def _look(self, running: _Running) -> None:
        """Go on with a part whose command has ended; end one whose time is up."""
        now, process = time.monotonic(), running.process
        if process is not None and process.alive():
            if now - running.noted > NOTED_S:
                running.noted = now
                process.remember()
            if running.told is None and now - running.began > running.limit:
                running.told = now
                running.todo.clear()
                running.failed.append(f"was not done in {running.limit:.0f} s")
                process.terminate()
            elif running.told is not None and now - running.told > GRACE_S:
                process.stop(0.0)
            return
        if process is not None:
            process.stop(0.0)  # what it left behind
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
        """A part that did not end well, and what is left out for it."""
        self._line(status, part.name, why)
        self.why[part.name] = why
        for each in [part, *self.queue.ended(part, False)]:
            if each is not part:
                self.why[each.name] = f"{part.name} did not end well"
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
