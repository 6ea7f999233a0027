"""Compile the kernels of many choices in processes of their own, so that Triton's compiler runs on all cores.

Each process runs its calls once and leaves the kernels in the caches on disk, from which later processes load them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

import torch

from fastkernels.verify import measure
from fastkernels.verify.measure import Point
from fk_bench.tune.choice import Choice, point_of, subject_of

MOST, EACH = 16, 2  # processes; choices of a task, which share their inputs
# A process that has too little memory says nothing about the kernel.
NO_FAILURE = ("OutOfMemoryError", "NoRoom")
Task = tuple[Point, list[Choice]]


def tasks_of(points: Mapping[Point, Sequence[Choice]]) -> list[Task]:
    """Choices one by one at their first points, then few at a time at the others."""
    first, others = measure.first_and_others(points, str)
    found: list[Task] = [(point, [choice]) for point, several in first for choice in several]
    return found + [
        (point, several[i : i + EACH]) for point, several in others for i in range(0, len(several), EACH)
    ]


class Ready:
    """Processes that import, which takes seconds, while the points are not yet known."""

    def __init__(self, device: str, processes: int = 0):
        self._workers = [_Worker(device) for _ in range(processes or usual_processes())]

    def take(self) -> list[_Worker]:
        """Hand the processes over to the caller."""
        taken, self._workers = self._workers, []
        return taken

    def close(self) -> None:
        """End the processes that were not taken."""
        for worker in self.take():
            worker.close()


def usual_processes() -> int:
    return min((os.cpu_count() or 2) - 1, MOST) or 1


class Compiling:
    """Processes that compile the choices of these points on a device until the time `end`.

    processes  0: as many as is usual; ready: some that have been started
    """

    def __init__(
        self, points: Mapping[Point, Sequence[Choice]], device: str, end: float, processes: int = 0,
        ready: Ready | None = None,
    ):  # fmt: skip
        self.device, self.end = device, end
        self.failed: dict[tuple[Point, str], str] = {}
        self._todo: queue.SimpleQueue[Task] = queue.SimpleQueue()
        tasks = tasks_of(points)
        for task in tasks:
            self._todo.put(task)
        count = min(processes or usual_processes(), len(tasks))
        started = ready.take() if ready is not None else []
        for worker in started[count:]:
            worker.close()
        firsts = [*started[:count], *[None] * (count - len(started))]
        self._threads = [threading.Thread(target=self._feed, args=(one,), daemon=True) for one in firsts]
        for thread in self._threads:
            thread.start()

    def wait(self) -> dict[tuple[Point, str], str]:
        """{(point, choice): why it has no kernel}, when all are compiled or the time is over."""
        for thread in self._threads:
            thread.join()
        while not self._todo.empty():
            self._fail(self._todo.get(), measure.LATE)
        return self.failed

    def _feed(self, worker: _Worker | None) -> None:
        """Give tasks to one process at a time until none is left. worker: the first one."""
        while time.monotonic() < self.end or worker is not None:
            worker = worker or _Worker(self.device)
            worker.until(self.end)
            try:
                while True:
                    try:
                        task = self._todo.get_nowait()
                    except queue.Empty:
                        return
                    reply = worker.run(task)
                    if reply is None:
                        late = time.monotonic() >= self.end
                        self._fail(task, measure.LATE if late else "its process ended while it was compiled")
                        break
                    point = task[0]
                    self.failed |= {(point, name): why for name, why in reply.items()}
                    if any("CUDA error" in why or "CUDA_ERROR" in why for why in reply.values()):
                        break  # nothing can run in that process any more
            finally:
                worker.close()
                worker = None

    def _fail(self, task: Task, reason: str) -> None:
        self.failed |= {(task[0], str(choice)): reason for choice in task[1]}


class _Worker:
    """A process that compiles one task after the other."""

    def __init__(self, device: str):
        command = [sys.executable, "-m", "fk_bench.tune.compile", device]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self._timer: threading.Timer | None = None

    def until(self, end: float) -> None:
        """Kill it at the time `end`."""
        self._timer = threading.Timer(max(end - time.monotonic(), 0.0), self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def run(self, task: Task) -> dict[str, str] | None:
        """The failed choices with the reasons; None if the process has ended."""
        point, several = task
        shape, sizes = point.named()
        choices = [[choice.provider, dict(choice.params)] for choice in several]
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps([point.op, shape, sizes, choices]), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of what a killed process has not read
                    pipe.close()


def serve(device: str, tasks: IO[str], replies: IO[str]) -> None:
    """Compile the tasks, a line of JSON each, and answer each with {choice: why it has no kernel}."""
    where = torch.device(device)
    generator = torch.Generator(where).manual_seed(0)
    for line in tasks:
        name, shape, sizes, choices = json.loads(line)
        point = point_of(name, shape, sizes)
        subjects = [subject_of(name, Choice(provider, params)) for provider, params in choices]
        try:
            with torch.inference_mode():
                found = measure.compiled({point: subjects}, where, generator, float("inf"))
            failed = {name: why for (_, name), why in found.items() if not why.startswith(NO_FAILURE)}
        except Exception as error:  # of the inputs, or of the device after a kernel's fault
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            failed = {} if text.startswith(NO_FAILURE) else {subject.name: text for subject in subjects}
        print(json.dumps(failed), file=replies, flush=True)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers may print
    serve(sys.argv[1], sys.stdin, answers)
