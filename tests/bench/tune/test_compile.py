"""Kernels of many choices, compiled in processes of their own."""

from __future__ import annotations

import io
import json
import time

import pytest
from fk_bench.tune import compile
from fk_bench.tune.choice import Choice, point_of
from fk_bench.tune.compile import Compiling, Ready, tasks_of

POINT = point_of("linear", {"N": 8, "K": 16, "dtype": "float32"}, {"M": 2})


def test_failures_of_a_process_are_reported() -> None:
    several = [Choice("reference"), Choice("reference", {"tiles": 16})]
    failed = Compiling({POINT: several}, "cpu", time.monotonic() + 120, processes=1).wait()
    assert list(failed) == [(POINT, "reference tiles=16")]
    assert "'tiles'" in failed[POINT, "reference tiles=16"]


def test_started_processes_are_used_and_the_others_end() -> None:
    ready = Ready("cpu", 2)
    processes = [worker._process for worker in ready._workers]
    several = [Choice("reference"), Choice("reference", {"tiles": 16})]
    failed = Compiling({POINT: several}, "cpu", time.monotonic() + 120, ready=ready).wait()
    assert list(failed) == [(POINT, "reference tiles=16")]
    assert not ready.take() and all(process.poll() is not None for process in processes)
    ready = Ready("cpu", 1)
    (process,) = [worker._process for worker in ready._workers]
    ready.close()
    assert process.poll() is not None


def test_nothing_starts_after_the_time() -> None:
    several = [Choice("reference"), Choice("onednn"), Choice("cublas")]
    failed = Compiling({POINT: several}, "cpu", time.monotonic() - 1, processes=2).wait()
    assert failed == {(POINT, choice.provider): compile.measure.LATE for choice in several}


def test_a_process_that_ends_loses_only_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Worker:
        def __init__(self, device: str) -> None:
            self.number = len(asked)

        def until(self, end: float) -> None:
            pass

        def run(self, task: compile.Task) -> dict[str, str] | None:
            asked.append([str(choice) for choice in task[1]])
            return None if len(asked) == 1 else {}

        def close(self) -> None:
            pass

    monkeypatch.setattr(compile, "_Worker", Worker)
    several = [Choice("triton-skinny", {"block_n": n}) for n in (16, 32, 64, 128)]
    failed = Compiling({POINT: several}, "cpu", time.monotonic() + 60, processes=1).wait()
    ended = "its process ended while it was compiled"
    assert failed == {(POINT, name): ended for name in asked[0]} and len(asked) == len(several)


def test_first_points_of_choices_are_compiled_first() -> None:
    other = point_of("linear", {"N": 8, "K": 32, "dtype": "float32"}, {"M": 2})
    several = [Choice("a"), Choice("b"), Choice("b", {"tiles": 2}), Choice("c")]
    found = tasks_of({POINT: several[:3], other: several})
    names = [(point, [str(choice) for choice in part]) for point, part in found]
    assert names == [
        (POINT, ["a"]), (POINT, ["b"]), (POINT, ["b tiles=2"]), (other, ["c"]), (other, ["a", "b"]),
        (other, ["b tiles=2"]),
    ]  # fmt: skip


def test_too_little_memory_is_no_failure_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(compile.measure, "compiled", full)
    task = json.dumps(["linear", {"N": 8, "K": 16, "dtype": "float32"}, {"M": 2}, [["reference", {}]]])
    replies = io.StringIO()
    compile.serve("cpu", io.StringIO(task + "\n"), replies)
    assert json.loads(replies.getvalue()) == {}
