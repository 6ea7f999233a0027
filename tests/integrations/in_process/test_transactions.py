"""Patch and undo are transactions: after any interruption a model is as before, or the next call makes it so."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import transformers
from fk_integrations.core.journal import Journal
from fk_integrations.patching import seam_interface
from fk_integrations.patching.in_process import STATE
from torch import nn

import fastkernels
from fastkernels.core import registry
from fastkernels.patch import PatchError, find_host

OURS = (
    "fk_integrations/core",
    "fk_integrations/seams",
    "fk_integrations/transformers/host",
    "fastkernels/patch.py",
)


def llama() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    return transformers.LlamaModel(config).eval()


def classes(model: Any) -> list[type]:
    return [type(m) for m in model.modules()]


class Stop(BaseException):
    """An interruption that no code of ours knows."""


@contextmanager
def interrupted_at(
    place: tuple[str, int] | None, error: type[BaseException]
) -> Iterator[dict[tuple[str, int], None]]:
    """Raise `error` when this line of our code runs first; yields the lines that have run."""
    seen: dict[tuple[str, int], None] = {}

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
            if here not in seen:
                seen[here] = None
                if here == place:
                    raise error
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return local if any(part in frame.f_code.co_filename for part in OURS) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def lines_of(run: Callable[[], object]) -> list[tuple[str, int]]:
    with interrupted_at(None, Stop) as seen:
        run()
    return list(seen)


def check_host_s(model: Any, before: list[type]) -> None:
    assert classes(model) == before and STATE not in vars(model)
    assert not any(key.startswith("_fastkernels") for m in model.modules() for key in vars(m))


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the entry points takes longer than a patch of these models."""
    host = find_host("transformers")
    monkeypatch.setattr(sys.modules["fastkernels.patch"], "find_host", lambda target: host)


@pytest.mark.parametrize(
    ("error", "step"),
    [(KeyboardInterrupt, 17), (Stop, 47), pytest.param(KeyboardInterrupt, 1, marks=pytest.mark.slow)],
)
def test_patch_interrupted_at_any_line_is_undone(error: type[BaseException], step: int) -> None:
    model = llama()
    before = classes(model)
    fastkernels.patch(model).undo()  # caches are filled
    places = lines_of(lambda: fastkernels.patch(model).rows)
    fastkernels.unpatch(model)
    check_host_s(model, before)
    assert len(places) > 150
    for place in places[::step]:
        with pytest.raises(error), interrupted_at(place, error):
            fastkernels.patch(model)
        check_host_s(model, before)
    fastkernels.patch(model).undo()
    check_host_s(model, before)


def test_undo_interrupted_at_any_line_is_ended_by_the_next() -> None:
    model = llama()
    before = classes(model)
    report = fastkernels.patch(model)
    places = lines_of(report.undo)
    assert len(places) > 20
    for i, place in enumerate(places):
        report = fastkernels.patch(model)
        with pytest.raises(KeyboardInterrupt), interrupted_at(place, KeyboardInterrupt):
            report.undo()
        state = vars(model).get(STATE)
        if i % 3 == 0:
            report.undo()
        elif i % 3 == 1 or (state is not None and state.whole):  # the undo had not begun
            fastkernels.unpatch(model)
        else:
            with fastkernels.patch(model) as again:
                assert again.active
        report.undo()
        check_host_s(model, before)


@pytest.mark.parametrize("step", range(6))
def test_interrupted_way_back_is_ended_by_the_next_call(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam raises at one step, and the undo of that at each of its own."""
    model = llama()
    before = classes(model)
    place: Any = seam_interface.find("leaf")
    stock, swaps = type(place).swap, []

    def swap(self: Any, made: Any) -> Any:
        swaps.append(made)
        if len(swaps) == 3:
            raise KeyboardInterrupt
        return stock(self, made)

    steps: list[int] = []
    undo = Journal.undo

    def undone(self: Journal) -> None:
        def stop() -> None:
            if not steps:
                steps.append(step)
                raise KeyboardInterrupt

        self.steps.insert(max(len(self.steps) - step, 0), stop)
        undo(self)

    with monkeypatch.context() as patched:
        patched.setattr(type(place), "swap", swap)
        patched.setattr(Journal, "undo", undone)
        with pytest.raises(KeyboardInterrupt):
            fastkernels.patch(model)
    fastkernels.unpatch(model)
    check_host_s(model, before)


@pytest.mark.parametrize("patch_of", ["op providers", "candidate"])
def test_interruption_restores_ops_of_the_process(patch_of: str, tmp_path: Any) -> None:
    file = tmp_path / "rms_norm.py"
    file.write_text("def rms_norm(x, weight=None, eps=1e-6, *more):\n    return x * 0\n")
    model = llama()
    op = registry.get("rms_norm").op
    candidates = {"rms_norm": str(file)} if patch_of == "candidate" else None
    fastkernels.patch(model, ops="rms_norm", candidates=candidates).undo()
    state = op.providers, op.candidate
    places = lines_of(lambda: fastkernels.patch(model, ops="rms_norm", candidates=candidates))
    fastkernels.unpatch(model)
    for place in places[::20]:
        with pytest.raises(KeyboardInterrupt), interrupted_at(place, KeyboardInterrupt):
            fastkernels.patch(model, ops="rms_norm", candidates=candidates)
        assert (op.providers, op.candidate) == state


def test_unpatch_needs_no_report() -> None:
    model = llama()
    before = classes(model)
    fastkernels.patch(model)
    with pytest.raises(PatchError, match=r"fastkernels\.unpatch"):
        fastkernels.patch(model)
    fastkernels.unpatch(model)
    fastkernels.unpatch(model)  # nothing is left to do
    check_host_s(model, before)


def test_unpatch_of_a_wrapper_reaches_the_patch_inside() -> None:
    model = llama()
    before = classes(model)
    fastkernels.patch(model)
    fastkernels.unpatch(nn.ModuleDict({"a": model}))
    check_host_s(model, before)


def test_a_step_that_fails_does_not_stop_the_others() -> None:
    journal, done = Journal(), []

    def fails() -> None:
        raise ValueError("no way back")

    for step in (lambda: done.append(1), fails, lambda: done.append(3)):
        journal.add(step)
    with pytest.raises(ValueError, match="no way back"):
        journal.undo()
    assert done == [3, 1] and not journal.steps


def test_stale_report_leaves_a_later_patch_alone() -> None:
    model = llama()
    first = fastkernels.patch(model, ops="rms_norm")
    fastkernels.unpatch(model)
    second = fastkernels.patch(model, ops="gated_mlp")
    assert first.refresh().rows == []
    first.undo()
    assert first.refresh().rows == [] and first.reset().rows == []
    assert [r.op for r in second.refresh().active] == ["gated_mlp"]
    second.undo()


def test_report_after_undo_frees_the_model() -> None:
    model = llama()
    report = fastkernels.patch(model)
    report.undo()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and report.rows


def test_interrupted_second_patch_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    report = fastkernels.patch(model, ops="rms_norm")
    with interrupted_at(None, Stop) as places, pytest.raises(PatchError):
        fastkernels.patch(model)
    for place in list(places)[::10]:
        with pytest.raises(BaseException), interrupted_at(place, KeyboardInterrupt):  # noqa: B017
            fastkernels.patch(model)
        assert [r.modules for r in report.refresh().active] == [3]
    report.undo()


def test_threads_patch_and_undo_one_model() -> None:
    model = llama()
    before, problems, done = classes(model), [], []

    def work() -> None:
        for _ in range(8):
            try:
                with fastkernels.patch(model) as report:
                    done.append(len(report.active))
            except PatchError as error:
                if "patched already" not in str(error):
                    problems.append(error)
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    finally:
        sys.setswitchinterval(switch)
    assert not problems and done and all(done)
    check_host_s(model, before)


def test_threads_patch_models_that_share_modules() -> None:
    whole = llama()
    parts = [whole.layers, whole]
    before, problems = classes(whole), []

    def work(target: Any) -> None:
        for _ in range(8):
            try:
                fastkernels.patch(target).undo()
            except PatchError as error:
                if "patched already" not in str(error):
                    problems.append(error)
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(parts[i % 2],)) for i in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not problems
    check_host_s(whole, before)
