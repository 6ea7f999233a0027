"""Rows and timing for machines with only torch and triton: the rows' schema is written out here, without pydantic."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

ROUNDS = 5
T95 = 2.776  # Student's t for ROUNDS samples


class Run:
    """The device, the time limit, the rows (schema of fk_bench.core.rows) and the count of wrong results.

    options: device ('cuda' or 'cpu'), quick, out (the row file), seconds (time limit; `left` counts down to 0).
    """

    def __init__(self, command: str, op: str, options: argparse.Namespace) -> None:
        self.device, self.quick, self.out = options.device, options.quick, options.out
        self.op, self.wrong, self.end = op, 0, time.monotonic() + options.seconds
        self.cuda = self.device == "cuda"
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.bad: set[tuple[str, str]] = set()
        self.summary: list[str] = []  # printed again at the end
        name = torch.cuda.get_device_name() if self.cuda else None
        self.common = {
            "schema": "fastkernels.row/1", "run_id": f"{command}-{os.getpid()}", "command": command,
            "machine": {"gpu": name, "gpus": int(self.cuda), "cpu": "", "cores": os.cpu_count() or 0},
            "versions": {"torch": str(torch.__version__), "triton": version("triton")}, "baseline": "cublas",
        }  # fmt: skip

    def left(self) -> float:
        return self.end - time.monotonic()

    def row(self, kind: str, provider: str, case: dict[str, Any], reason: str = "", status: str = "",
            quiet: bool = False, ci95: dict[str, tuple[float, float]] | None = None,
            **metrics: float) -> None:  # fmt: skip
        """Print and write a row; a reason without a status means a wrong result. ci95: intervals of some metrics."""
        status = status or ("wrong" if reason else "ok")
        self.wrong += status in ("wrong", "failed")
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        row = {
            **self.common, "time": now, "status": status, "reason": reason,
            "subject": {"op": self.op, "provider": provider}, "case": {"kind": kind, "device": self.device, **case},
            "metrics": metrics, **({"ci95": ci95} if ci95 else {}),
        }  # fmt: skip
        with open(self.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        if not quiet or status != "ok":
            where = " ".join(str(v) for v in case.values())
            values = " ".join(f"{k}={v:.5g}" for k, v in metrics.items())
            print(f"{kind:<6} {provider:<14} {where:<52} {status} {values} {reason}", flush=True)

    def randn(self, *size: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(size, dtype=dtype, device=self.device)
        return made.normal_(0.0, scale, generator=self.generator)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Make torch.empty return NaN, so that outputs that are never written are found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


class Compiles:
    """Stand-in for a Triton kernel that compiles each launch into Triton's cache instead of running it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel.warmup, grid=grid)


def finish(workers: Iterable[subprocess.Popen[bytes]], seconds: float) -> list[str]:
    """Wait for processes and kill those that take longer; return a message for each that failed.

    Kernels that a compiling process did not finish are compiled at first use.
    """
    end, lost = time.monotonic() + seconds, []
    for i, worker in enumerate(workers):
        try:
            if status := worker.wait(max(end - time.monotonic(), 0.1)):
                lost.append(f"process {i} ended with {status}")
        except subprocess.TimeoutExpired:
            worker.kill()
            lost.append(f"process {i} did not end in {seconds:.0f} s")
    return lost


class Clock:
    """Seconds of n passes over some calls: replays of a CUDA graph of them; on a CPU the calls themselves."""

    def __init__(self, run: Run, calls: list[Callable[[], Any]]) -> None:
        self.run, self.calls, self.samples = run, calls, list[float]()
        if run.cuda:
            calls[0]()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for call in calls:
                    call()
            self.graph.replay()
            once = self._seconds(3) / 3
            self.n = max(1, round(2e-3 / once))
        else:
            self.n = 1

    def _seconds(self, n: int) -> float:
        if self.run.cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(n):
                self.graph.replay()
            stop.record()
            torch.cuda.synchronize()
            return 1e-3 * start.elapsed_time(stop)
        begin = time.perf_counter()
        for _ in range(n):
            for call in self.calls:
                call()
        return time.perf_counter() - begin

    def sample(self) -> None:
        single, double = self._seconds(self.n), self._seconds(2 * self.n)
        # The slope excludes start-up costs; on a CPU calls scatter more than that.
        self.samples.append((double - single) / self.n if self.run.cuda else double / (2 * self.n))


def measure(run: Run, todo: dict[str, list[Callable[[], Any]]]) -> dict[str, float]:
    """Return microseconds of a pass over each list of calls: the median of `rounds`."""
    return {name: statistics.median(each) for name, each in rounds(run, todo).items()}


def rounds(run: Run, todo: dict[str, list[Callable[[], Any]]], count: int = ROUNDS) -> dict[str, list[float]]:
    """Return microseconds of a pass in each of `count` interleaved rounds, one on a CPU.

    Lists that raise are left out and reported.
    """
    clocks = {}
    for name, calls in todo.items():
        try:
            clocks[name] = Clock(run, calls)
        except Exception as error:
            run.row("time", name, {}, f"{type(error).__name__}: {str(error)[:200]}", "unsupported")
    for _ in range(count if run.cuda else 1):
        for clock in clocks.values():
            clock.sample()
    return {name: [1e6 * s for s in clock.samples] for name, clock in clocks.items()}


def against(mine: list[float], other: list[float]) -> tuple[float, tuple[float, float]]:
    """Return how many times as fast as `other`, with the 95% interval over the rounds."""
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    mean, half = statistics.fmean(ratios), 0.0
    if len(ratios) == ROUNDS:
        half = T95 * statistics.stdev(ratios) / ROUNDS**0.5
    return mean, (mean - half, mean + half)
