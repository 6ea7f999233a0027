"""The choice between ours and PyTorch's code for a shape, with times that the tests give."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkernels.core.runtime import measured
from fastkernels.core.runtime.graph_capture import captured


def given(*shape: int) -> Any:
    """The attributes of a tensor on a GPU that `slower` reads."""
    device = SimpleNamespace(index=0)
    return SimpleNamespace(is_cuda=True, device=device, dtype=torch.float16, shape=shape, stride=lambda: (1,))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    found = {"ours": 2.0, "other": 1.0}

    def timed(call: Any) -> float:
        assert measured.slower("inner", "", given(1), lambda: "ours", lambda: "other") is None
        found[f"{call()} calls"] = found.get(f"{call()} calls", 0) + 1
        return found[call()]

    measured.forget()
    monkeypatch.setattr(measured, "_time", timed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield found
    measured.forget()


def ask(*shape: int, key: str = "") -> str | None:
    return measured.slower("op", key, given(*shape), lambda: "ours", lambda: "other")


def test_the_faster_one_runs_from_then_on(times: dict[str, float]) -> None:
    assert ask(3) is None and "ours calls" not in times, "nothing is measured outside of `measuring`"
    with measured.measuring():
        assert ask(3) == "PyTorch's code takes 1000.0 us for this shape, ours 2000.0"
        times["other"] = 1.99  # within the margin
        assert ask(9) is None and ask(3, key="stride 2") is None
        assert ask(4) == ask(3) and ask(16) is None, "batches up to the next power of two are one"
    assert ask(3) is not None and ask(9) is None and ask(5) is None
    assert times["ours calls"] == times["other calls"] == 3


def test_what_cannot_be_measured_stays_ours(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: Any) -> float:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(measured, "_time", fails)
    with measured.measuring():
        assert ask(3) is None
        monkeypatch.setattr(measured, "_time", lambda call: times[call()])
        assert ask(3) is None, "a shape is tried once"
        assert ask(5) is not None, "and the next one is measured"


def test_shapes_are_measured_up_to_a_limit(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST", 2)
    with measured.measuring():
        assert [ask(n) is None for n in (3, 5, 9, 3)] == [False, False, True, False]
    assert times["ours calls"] == 2


def test_threads_capture_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture synchronizes the device first, which ends the capture of another thread."""
    running, most = [0], [0]

    @contextmanager
    def graph(given: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        yield
        running[0] -= 1

    def capture(number: int) -> None:
        with captured(None, pool=number):  # type: ignore[arg-type]
            time.sleep(0.01)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(capture, range(3)))
    assert most == [1]


def test_tensors_on_a_cpu_are_left_alone(times: dict[str, float]) -> None:
    with measured.measuring():
        assert measured.slower("op", "", torch.ones(2), lambda: "ours", lambda: "other") is None
    assert "ours calls" not in times
