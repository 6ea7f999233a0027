"""The choice between ours and PyTorch's code for a shape, with times that the tests give."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkernels.core import compile_cache, kept_files
from fastkernels.core.runtime import measured
from fastkernels.core.runtime.graph_capture import captured, captured_on


def given(*shape: int) -> Any:
    """The attributes of a tensor on a GPU that `slower` reads."""
    device = SimpleNamespace(index=0)
    return SimpleNamespace(is_cuda=True, device=device, dtype=torch.float16, shape=shape, stride=lambda: (1,))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, float]]:
    """Times of the calls, and how many were timed."""
    found = {"ours": 2.0, "other": 1.0}
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    compile_cache.folder.cache_clear()

    def timed(call: Any, device: Any) -> float:
        assert measured.slower("inner", "", given(1), lambda: "ours", lambda: "other") is None
        found[f"{call()} calls"] = found.get(f"{call()} calls", 0) + 1
        return found[call()]

    measured.forget()
    monkeypatch.setattr(measured, "_time", timed)
    monkeypatch.setattr(measured, "_name", lambda index: "Imaginary X1")
    monkeypatch.setattr(kept_files, "source_digest", lambda root: "sources")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield found
    measured.forget()
    compile_cache.folder.cache_clear()


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


def test_common_choice_holds_for_batches_between(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with measured.measuring():
        assert ask(4) is not None and ask(16) is not None and times["ours calls"] == 2
        assert ask(8) == ask(4) and times["ours calls"] == 2
        times["other"] = 2.0  # caches hold less of larger batches
        assert ask(64) is None and times["ours calls"] == 3
        assert ask(32) is None and times["ours calls"] == 4, "the batches around it differ"
        assert ask(2) is None and times["ours calls"] == 5, "there is no smaller one"
        assert ask(8, key="stride 2") is None and times["ours calls"] == 6


def test_slow_measurements_end_with_pytorchs_code(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(measured, "_now", lambda: clock[0])
    times["other"] = 3.0
    with measured.measuring():
        assert ask(1) is None
        clock[0] += measured.BUDGET_S + 1
        assert (
            ask(2) == ask(3, key="stride 2") == "not measured within 10 s of the first step with this shape"
        )
        assert ask(1) is None, "what is known stays"
    assert times["ours calls"] == 1 and ask(2) is not None
    (record,) = caplog.records
    assert record.getMessage().startswith("2 shapes of a step were not measured within 10 s: PyTorch's code")
    with measured.measuring() as left:
        assert ask(8, key="stride 2") is None, "the next step has its own time"
        times["other"] = 3.0
        assert ask(2) is None and not left, "also for what the last one left"
    assert ask(2) is None and ask(3, key="stride 2") is not None, "what no step measured stays PyTorch's"


def test_a_shape_without_time_is_asked_once_in_a_step(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(measured, "_now", lambda: clock[0])
    for _ in range(2):
        with measured.measuring() as left:
            clock[0] += measured.BUDGET_S + 1
            for _ in range(3):
                assert ask(2) is not None
            clock[0] -= 2  # there is time again
            assert ask(2) is not None and len(left) == 1
    assert "ours calls" not in times


def test_faster_one_of_two_calls_runs(times: dict[str, float]) -> None:
    x = torch.ones(2)
    calls = ("op", "", given(2), lambda: x, lambda: 2 * x)
    assert torch.equal(measured.faster(*calls), x)
    measured._slower[("op", 0, torch.float16, (2,), (1,), "")] = "PyTorch's code is faster"
    assert torch.equal(measured.faster(*calls), 2 * x)


def test_what_cannot_be_measured_stays_ours(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(call: Any, device: Any) -> float:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(measured, "_time", fails)
    with measured.measuring():
        assert ask(3) is None and ask(17) is None
        monkeypatch.setattr(measured, "_time", lambda call, device: times[call()])
        assert ask(3) is None, "a shape is tried once"
        assert ask(5) is not None, "and the next one is measured"
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert warning == (
        "op: ours runs for (3,), which could not be measured: not permitted when stream is capturing"
    ), "one line for a step"


@pytest.mark.gpu
def test_times_of_a_gpu_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each step has a pool of its own, also while memory of the last one is held."""
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    compile_cache.folder.cache_clear()
    measured.forget()
    held: list[torch.Tensor] = []

    def slow(x: torch.Tensor) -> None:
        held.append(x @ x)

    for size in (2048, 4096):
        x = torch.randn(size, size, device="cuda")
        with measured.measuring():
            for key in ("a", "b"):
                found = measured.slower("op", key, x, lambda x=x: slow(x), lambda x=x: x.sum())
                assert found is not None and found.startswith("PyTorch's code takes"), found
    (file,) = (tmp_path / "measured").glob("*.json")
    assert len(json.loads(file.read_text())["entries"]) == 4
    measured.forget()
    compile_cache.folder.cache_clear()


def test_shapes_are_measured_up_to_a_limit(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST", 2)
    with measured.measuring():
        assert [ask(n) is None for n in (3, 5, 9, 3)] == [False, False, True, False]
    assert times["ours calls"] == 2


def next_process() -> None:
    measured.forget()
    compile_cache.folder.cache_clear()


def test_next_process_measures_what_is_new_only(times: dict[str, float]) -> None:
    with measured.measuring():
        assert ask(3) is not None and ask(9, key="b") is not None
    next_process()
    times |= {"ours": 1.0, "other": 2.0}  # would be another choice
    with measured.measuring():
        assert (
            ask(4) == "PyTorch's code takes 1000.0 us for this shape, ours 2000.0"
            and times["ours calls"] == 2
        )
        assert ask(9, key="c") is None and times["ours calls"] == 3
    next_process()
    with measured.measuring():
        assert ask(9, key="c") is None and times["ours calls"] == times["other calls"] == 3


def test_other_facts_are_measured_again(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    with measured.measuring():
        ask(3)
    for change in (
        lambda: monkeypatch.setattr(measured, "_name", lambda index: "Imaginary X2"),
        lambda: monkeypatch.setattr(torch, "__version__", "0.1"),
        lambda: monkeypatch.setattr(kept_files, "source_digest", lambda root: "other sources"),
    ):
        change()
        next_process()
        before = times["ours calls"]
        with measured.measuring():
            ask(3)
        assert times["ours calls"] == before + 1


def test_without_verification_kept_choices_apply(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with measured.measuring():
        ask(3)
    next_process()
    monkeypatch.setenv("FASTKERNELS_VERIFY", "0")
    with measured.measuring():
        assert ask(3) is not None and ask(9) is None
    assert times["ours calls"] == 1


def test_unusable_files_are_measured_again(
    times: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with measured.measuring():
        ask(3)
    (file,) = (tmp_path / measured.NAME).glob("*.json")
    whole = file.read_text()
    (name,) = json.loads(whole)["entries"]
    foreign = json.dumps({**json.loads(whole), "facts": {}})
    damaged = [whole.replace("2.0", wrong) for wrong in ("-1.0", "NaN", '"2.0"', "true", "[]")]
    for text in (whole[:-9], "[1]", "\ud800", "[" * 100_000, foreign, *damaged):
        file.write_bytes(text.encode(errors="surrogatepass"))
        next_process()
        caplog.clear()
        before = times["ours calls"]
        with measured.measuring():
            assert ask(3) is not None
        assert times["ours calls"] == before + 1 and "measured again" in caplog.text, text[:80]
        assert list(json.loads(file.read_text())["entries"]) == [name], "the next process finds a whole file"


def test_folders_that_cannot_be_written_are_harmless(
    times: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fastkernels")
    with measured.measuring():
        ask(3)
    next_process()
    monkeypatch.setattr(compile_cache, "unwritable", lambda path: "read-only")  # root may write anywhere
    with measured.measuring():
        assert ask(3) is not None and ask(9) is not None and ask(9) is not None
    assert times["ours calls"] == 2 and len(caplog.records) == 1
    (file,) = (tmp_path / measured.NAME).glob("*.json")
    file.unlink()
    file.mkdir()  # a file cannot replace it
    kept_files.replace(file, "{}")
    assert "not kept" in caplog.text and {p.name for p in file.parent.iterdir()} == {".lock", file.name}


def test_long_steps_keep_their_times_meanwhile(
    times: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(measured, "_now", lambda: clock[0])
    with measured.measuring():
        ask(3)
        assert not (tmp_path / measured.NAME).exists()
        clock[0] += measured.KEEP_S
        ask(5)
        (file,) = (tmp_path / measured.NAME).glob("*.json")
        assert len(json.loads(file.read_text())["entries"]) == 2


def test_writers_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opens the lock's file itself, as processes do."""
    monkeypatch.setattr(compile_cache, "folder", lambda name: tmp_path)

    def add(i: int) -> None:
        kept_files.add("shared", {"chip": "X"}, {str(i): [1.0, 2.0]}, lambda entry: True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(16)))
    (file,) = tmp_path.glob("*.json")
    assert len(json.loads(file.read_text())["entries"]) == 16


def test_threads_capture_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture synchronizes the device first, which ends the capture of another thread."""
    running, most = [0], [0]

    def begin(**options: Any) -> None:
        assert options["capture_error_mode"] == "thread_local"
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)

    def end() -> None:
        running[0] -= 1

    @contextmanager
    def graph(given: Any, **options: Any) -> Iterator[None]:
        begin(**options)
        yield
        end()

    def capture(number: int) -> None:
        own: Any = SimpleNamespace(capture_begin=begin, capture_end=end)
        kind = captured_on(own, own, pool=1) if number % 2 else captured(own, pool=1)
        with kind:
            time.sleep(0.01)

    def synchronize() -> None:
        assert running == [0], "it would end a capture"

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(capture, range(4)))
    assert most == [1]


def test_tensors_on_a_cpu_are_left_alone(times: dict[str, float]) -> None:
    with measured.measuring():
        assert measured.slower("op", "", torch.ones(2), lambda: "ours", lambda: "other") is None
    assert "ours calls" not in times
