"""Real-time priority of the judge and its sides during timed batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fk_bench.core.rows import Status
from fk_bench.kernels.judge import Judge, Options
from fk_bench.kernels.judge.processes.priority import raised

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
LOOP = [sys.executable, "-c", "while True: pass"]
NEW = "import os; print(os.sched_getscheduler(0), flush=True)"
UNPRIVILEGED = """
import os
from fk_bench.kernels.judge.processes.priority import raised
os.setresuid(65534, 65534, 65534)
with raised([]) as report:
    print(report, os.sched_getscheduler(0))
"""
GELU = """
import torch
def gelu(x, approximate="none"):
    return torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype)
"""


@contextmanager
def running(command: list[str], number: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


@pytest.fixture
def allowed() -> None:
    with raised([]) as report:
        if report != "on":
            pytest.skip(f"real-time priority is {report}")


@pytest.mark.usefixtures("allowed")
def test_priority_is_restored_and_not_inherited() -> None:
    before = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    with running(SLEEPER) as (side,):
        with raised([side.pid]) as report:
            policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
            assert report == "on" and os.sched_getscheduler(0) == os.sched_getscheduler(side.pid) == policy
            assert os.sched_getparam(0).sched_priority > os.sched_getparam(side.pid).sched_priority
            child = subprocess.run([sys.executable, "-c", NEW], capture_output=True, text=True)
            assert int(child.stdout) == os.SCHED_OTHER
        assert os.sched_getscheduler(side.pid) == os.SCHED_OTHER
    assert (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority) == before


@pytest.mark.usefixtures("allowed")
def test_ended_side_leaves_all_priorities_unchanged() -> None:
    with running(SLEEPER) as (side,):
        pass
    with raised([side.pid]) as report:
        assert report == "off: No such process" and os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up its rights")
def test_priority_without_rights_is_off_with_reason() -> None:
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=True)
    assert done.stdout == f"off: Operation not permitted {os.SCHED_OTHER}\n"


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_identity_is_steady_next_to_busy_loops(tmp_path: Path) -> None:
    """Without real-time priority three of four cases were unsteady (2026-11, two cores)."""
    file = tmp_path / "gelu.py"
    file.write_text(GELU)
    options = Options(cases=("random",), against=str(file))
    with running(LOOP, os.cpu_count() or 1), Judge({"gelu": file}, options) as judge:
        judge.op("gelu")
    rows = [r for r in judge.rows if r.kind == "case" and r.status is not Status.SKIPPED]
    assert rows and {r.status for r in rows} == {Status.OK}, [r.reason for r in rows]
    timed = [r for r in rows if "speedup" in r.metrics]
    assert len(timed) >= len(rows) / 2, [r.reason for r in rows]
    assert sum(bool(r.case["significant"]) for r in timed) <= 1
