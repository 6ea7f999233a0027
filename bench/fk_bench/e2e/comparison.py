"""One model of `fk-bench patch-compare`: its processes, the states in turn, and the rows."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastkernels.verify import phases
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.e2e.loads import Kind, Load
from fk_bench.e2e.media import Media, MediaPlace
from fk_bench.e2e.ratios import COMMAND, ENGINE, STATES, summary, throughput_of, undo_rows
from fk_bench.e2e.runs import Prompts, first_run, metrics_of_answer, too_little_cached
from fk_bench.e2e.startup import logged_parts
from fk_bench.offline.host import HostProcess, make_row

TRACED = 16  # decode steps of a traced run
MOST_REPEATS = 20


@dataclass(frozen=True)
class Extent:
    """How much is measured of a model.

    cycles   times that the host is patched and undone
    repeats  runs of each load in each state, after one more
    seconds  approximate limit of a model's runs, which reduces the repeats to `least`; 0: no limit
    load_seconds  a load that takes less time is repeated more often, until its runs take so long (at most 20 times)
    again    loads whose output throughput is less than so many times the stock host's are measured in one more cycle
    trace    the time of the GPU in a decode step is measured with a profiler
    """

    loads: Sequence[Load]
    cycles: int = 2
    repeats: int = 3
    seconds: float = 0.0
    load_seconds: float = 0.0
    again: float = 0.0
    trace: bool = False
    least: int = 2


class Comparison:
    """One model in one host, patched and undone; with `engine`, the settings of our engine, in that as well.

    place, media  of its requests
    """

    def __init__(
        self, model: str, host: str, python: str, settings: dict[str, Any], folder: Path, timeout: float,
        before_construction: bool, ops: Sequence[str] | None, env: Mapping[str, str], place: MediaPlace, media: Media,
        engine: dict[str, Any] | None = None,
    ):  # fmt: skip
        self.model, self.host, self.python, self.settings, self.folder = model, host, python, settings, folder
        self.timeout, self.before, self.ops, self.env = timeout, before_construction, ops, env
        self.engine_settings = engine
        self._repeats, self._seed, self._case = dict[Load, int](), 0, dict[str, Any]()
        self.took: dict[str, float] = {}  # seconds of each part of the measurement
        self._starts: list[tuple[HostProcess, dict[str, Any]]] = []
        self.process: HostProcess | None = None
        self.engine: HostProcess | None = None
        self.versions = machine.interpreter(python).versions
        self.place, self.media = place, media

    def start(self) -> None:
        """Start the processes. They are not ready yet: models that share a GPU start side by side."""
        self.process = self._started(STATES[0])
        if self.engine_settings is not None:
            self.engine = HostProcess(
                ENGINE, machine.absolute(sys.executable), self.engine_settings, self.folder, log=self._log(ENGINE)
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the processes are ready. Raises HostFailed."""
        for process in (self.process, self.engine):
            if process is not None:
                self._starts.append((process, process.answer(self.timeout)))

    def start_seconds(self) -> dict[str, float]:
        """The seconds of the parts of the first starts: up to the engine, and those that a host's log tells."""
        found = dict[str, float]()
        for process, first in self._starts:
            last = process.started
            for name, end in first["ends"]:
                found[f"start_s {process.name} {name}"], last = end - last, end
            parts = logged_parts(process.log.read_text(errors="replace"))
            found |= {f"start_s {process.name}'s {part}": took for part, took in parts.items()}
        return found

    def stop(self) -> None:
        for process in (self.process, self.engine):
            if process is not None:
                process.stop()
        self.process = self.engine = None

    def _started(self, state: str) -> HostProcess:
        env = {**self.env, "FASTKERNELS": "1" if self.before and state == "patched" else "0"}
        if self.ops is not None:
            env["FASTKERNELS_OPS"] = ",".join(self.ops)
        return HostProcess(
            self.host, self.python, self.settings, self.folder, env=env, log=self._log(self.host)
        )

    def _log(self, host: str) -> str:
        return f"{Path(self.model).name}-{host}"

    def measure(self, extent: Extent, seed: int, case: dict[str, Any]) -> Iterator[Row]:
        """All rows of the model, as they are measured. Raises HostFailed."""
        blocks = 2 * extent.cycles + 1
        self._repeats, self._seed, self._case = dict.fromkeys(extent.loads, extent.repeats), seed, case
        self._prompts = Prompts(f"{seed} {self.model}", extent.loads, self.place, self.media)
        began = time.monotonic()
        made: list[Row] = []
        for block in range(blocks):
            for row in self._block(block, extent, extent.loads, block < 2, {}):
                made.append(row)
                yield row
        lines = summary(made) if extent.again else []
        slow = {
            line["load"] for line in lines if line.get(f"{throughput_of(line)}_ratio", 1.0) < extent.again
        }
        if loads := [load for load in extent.loads if str(load) in slow]:
            for block in (blocks, blocks + 1):
                for row in self._block(block, extent, loads, False, {"again": True}):
                    made.append(row)
                    yield row
        for where, metrics, intervals in () if self.before else undo_rows(made):
            yield self._row({**where, "state": "undo"}, metrics, intervals=intervals)
        seconds = {f"seconds {part}": took for part, took in self.took.items()}
        self.took["total"] = time.monotonic() - began + self.took.get("start", 0.0)
        seconds |= self.start_seconds()
        yield self._row({"state": "end"}, {"seconds": self.took["total"], **seconds})

    def _block(
        self, block: int, extent: Extent, loads: Sequence[Load], trace: bool, more: dict[str, Any]
    ) -> Iterator[Row]:
        state = STATES[block % 2]
        change = self._enter(state, block)
        first_s, number, took = 0.0, -1, dict[Load, float]()
        while due := [load for load in loads if number < self._repeats[load]]:
            for load in due:  # run -1 is the first of its load: it may compile or allocate
                began = time.monotonic()
                given = load if number >= 0 else first_run(load)
                where = {
                    "state": state,
                    "block": block,
                    "run": number,
                    "load": str(load),
                    "kind of load": load.kind,
                }
                where |= {**vars(load), **more}
                prompts = f"{self._seed} {self.model} {block} {number} {load}"
                metrics, problem = self._run(self.process, given, prompts)
                if number < 0:
                    metrics |= change
                yield self._row(where, metrics, too_little_cached(load, number, metrics) or problem)
                if self.engine is not None and state == STATES[0]:
                    metrics, problem = self._run(self.engine, given, prompts)
                    where["state"] = ENGINE
                    yield self._row(
                        where, metrics, too_little_cached(load, number, metrics) or problem, ENGINE
                    )
                took[load] = time.monotonic() - began
                self._spent(str(load), took[load])
            if number < 0:
                first_s = sum(took.values())
                # Before the runs that are compared: what a profiler leaves behind is then in all of them.
                if trace and extent.trace:
                    for load in loads:
                        if load.output_len > TRACED and load.kind is not Kind.MIXED:
                            began = time.monotonic()
                            yield self._traced(load, state, block)
                            self._spent("profiles", time.monotonic() - began)
            elif number == 0 and block == 0:
                self._repeats = repeats_of(extent, first_s, took)
            number += 1

    def _spent(self, part: str, seconds: float) -> None:
        self.took[part] = self.took.get(part, 0.0) + seconds

    def _row(
        self, more: dict[str, Any], metrics: dict[str, float], problem: str = "", host: str = "",
        intervals: Mapping[str, tuple[float, float]] | None = None,
    ) -> Row:  # fmt: skip
        host = host or self.host
        return make_row(
            host, {"kind": "toggled", **self._case, **more}, metrics, command=COMMAND,
            subject=Subject(model=self.model, host=self.host, provider=ENGINE if host == ENGINE else None),
            versions=self.versions, status=Status.WRONG if problem else Status.OK, reason=problem,
            ci95=intervals or {},
        )  # fmt: skip

    def _traced(self, load: Load, state: str, block: int) -> Row:
        """The GPU's time in a step of decoding: of a run with more tokens, less that of a run with one.

        The prompts differ, since a prefix cache would spare the second run its prompts.
        """
        found = [
            self._answer(self.process, replace(load, output_len=n), f"{self._seed} trace {block} {n} {load}", "traced")
            for n in (1, 1 + TRACED)
        ]  # fmt: skip
        step_ms = (found[1]["busy_us"] - found[0]["busy_us"]) / TRACED / 1e3
        where = {"state": state, "block": block, "traced": True, "load": str(load), **vars(load)}
        return self._row(where, {"gpu_step_ms": step_ms, "allocations": found[1]["allocations"]})

    def _enter(self, state: str, block: int) -> dict[str, float]:
        """Bring the host into a state; the seconds of a live change, in all and of each phase."""
        assert self.process is not None
        began = time.monotonic()
        if block == 0:
            self.process.tell({"memory": True})
            return _memory(self.process.answer(self.timeout))
        if self.before:
            self.process.stop()
            self.process = self._started(state)
            self.process.answer(self.timeout)
            self._spent("start", time.monotonic() - began)
            return {}
        self.process.tell({"patch": self.ops} if state == "patched" else {"undo": True})
        answer = self.process.answer(self.timeout)
        self._spent("changes", time.monotonic() - began)
        parts = {f"change_s {phase}": seconds for phase, seconds in answer["phases"].items()}
        said = f"{state} after {answer['seconds']:.1f} s ({phases.line(answer['phases'])})"
        print(f"{self.model}: {said}", file=sys.stderr, flush=True)
        return {"change_s": answer["seconds"], **parts, **_memory(answer)}

    def _run(self, process: HostProcess | None, load: Load, seed: str) -> tuple[dict[str, float], str]:
        answer = self._answer(process, load, seed, "arrivals")
        return metrics_of_answer(answer, load, self.place)

    def _answer(self, process: HostProcess | None, load: Load, seed: str, kind: str) -> dict[str, Any]:
        assert process is not None
        process.tell({**self._prompts.work(load, seed), kind: True})
        return process.answer(self.timeout)

    def seconds(self) -> str:
        """The time of the model by parts, for people: '221 s: start 58, changes 71, 8x2048+8 12'."""
        parts = [f"{name} {took:.0f}" for name, took in self.took.items() if name != "total"]
        return f"{self.took.get('total', 0.0):.0f} s: {', '.join(parts)}"


def _memory(answer: Mapping[str, Any]) -> dict[str, float]:
    return {f"memory_gib {kind}": size for kind, size in answer["memory"].items()}


def repeats_of(extent: Extent, first_s: float, took: Mapping[Load, float]) -> dict[Load, int]:
    """How often each load is run in a state. first_s: seconds of all first runs; took: of one compared run."""
    most = extent.repeats
    if extent.seconds:
        left = extent.seconds / (2 * extent.cycles + 1) - first_s
        most = max(min(extent.least, most), min(most, int(left / sum(took.values()))))
    return {
        load: max(most, min(MOST_REPEATS, math.ceil(extent.load_seconds / seconds)))
        for load, seconds in took.items()
    }
