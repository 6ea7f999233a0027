"""Models of `fk-bench patch-compare`, each in a process of its own, on one GPU or on each of several."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from fk_bench.core.gpus import cores_of, placed, visible
from fk_bench.core.rows import Row, Status
from fk_bench.core.terminal.flags import ConfigError, comma_list
from fk_bench.e2e.asked import Asked

GRACE_S = 60.0  # for a process to stop its engines
TAIL = 5  # lines of a process's standard error in the reason of its failure


def chosen_gpus(text: str, count: int) -> list[str]:
    """The GPUs of `--gpus`, as entries of CUDA_VISIBLE_DEVICES. Raises ConfigError."""
    here = visible(count)
    if text == "all":
        found = here
    else:
        found = list(dict.fromkeys(comma_list("--gpus", text, str)))
        if unknown := [gpu for gpu in found if gpu not in here]:
            known = f"give all, or some of {', '.join(here)}" if here else "this machine has none"
            raise ConfigError(f"--gpus: no GPU {unknown[0]!r}: {known}")
    if not found:
        raise ConfigError("--gpus all: this machine has no GPU; leave the option out")
    return found


class Apart:
    """Runs models one after the other on each of `gpus`; [] for the GPU, or the CPU, that this process has.

    failed  {model: reason} of those that could not be measured
    """

    def __init__(self, asked: Asked, models: Sequence[str], gpus: Sequence[str], late: float):
        self.asked, self.waiting, self.gpus, self.late = asked, deque(models), list(gpus), late
        self.failed: dict[str, str] = {}
        self._rows: queue.Queue[Row | None] = queue.Queue()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._cores = cores_of(self.gpus) if self.gpus else {}

    def measure(self) -> Iterator[Row]:
        """All rows, as they are measured; processes that still run are ended if the caller stops."""
        workers = [threading.Thread(target=self._work, args=(gpu,), daemon=True) for gpu in self.gpus or [""]]
        try:
            for worker in workers:
                worker.start()
            ended = 0
            while ended < len(workers):
                row = self._rows.get()
                if row is None:
                    ended += 1
                else:
                    yield row
        finally:
            self.waiting.clear()
            for process in list(self._running):
                process.terminate()
            for worker in workers:
                worker.join(GRACE_S)

    def _work(self, gpu: str) -> None:
        try:
            while time.monotonic() < self.late:
                with self._lock:
                    if not self.waiting:
                        return
                    model = self.waiting.popleft()
                try:
                    self._measure(model, gpu)
                except Exception as error:  # the other models are measured whatever this is
                    self._failed(model, f"{type(error).__name__}: {error}")
        finally:
            self._rows.put(None)

    def _failed(self, model: str, reason: str) -> None:
        self._rows.put(self.asked.row(model, Status.DIED, reason, state="failed"))
        self.failed[model] = reason
        print(f"{model}: {reason}", file=sys.stderr)

    def _measure(self, model: str, gpu: str) -> None:
        command: tuple[str, ...] = (sys.executable, "-m", "fk_bench.e2e.asked", self.asked.to_json([model]))
        env = dict(os.environ)
        if gpu:
            more, command = placed(command, [gpu], self._cores)
            env |= more
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
        self._running.add(process)
        tail: deque[str] = deque(maxlen=TAIL)
        echo = threading.Thread(target=_echo, args=(process, tail), daemon=True)
        echo.start()
        reason, ended = "", False
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            if "failed" in found:
                reason = found["failed"]
                continue
            row = Row.model_validate(found)
            ended |= row.case["state"] == "end"
            self._rows.put(row)
        status = process.wait()
        echo.join(1.0)
        self._running.discard(process)
        if reason:
            self.failed[model] = reason
        elif not ended:  # it crashed, or was killed
            self._failed(model, f"its process ended with status {status}: {' '.join(tail)[-500:]}")


def _echo(process: subprocess.Popen[str], tail: deque[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        tail.append(line.strip())
        print(line, end="", file=sys.stderr, flush=True)
