"""Modules whose eager calls are the host's cost these nothing, and are ours in compiled code and CUDA graphs."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from fk_integrations.live import asleep, traced, trials
from fk_integrations.live.asleep import FIRST_CALL, TALLY
from torch import nn
from torch._dynamo.callback import callback_handler

import fastkernels

timm = pytest.importorskip("timm")
SIZES = {"img_size": 32, "embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 7}
# Of a call that the host runs: the wrapper, whether Dynamo traces it, whether its tensor is captured.
CALLS = 3


@pytest.fixture(autouse=True)
def decided(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """Ours wins in CUDA graphs only; the shapes that were decided."""
    shapes: list[torch.Size] = []

    def measured(theirs: Callable[[], torch.Tensor], *_: Any) -> trials.Choice:
        shapes.append(theirs().shape)
        return trials.Choice(True, False, "ours in CUDA graphs")

    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setattr(trials, "_measured", measured)
    monkeypatch.setattr(traced, "why_not", lambda device: None)
    monkeypatch.setattr(traced, "_how", lambda: ({}, "eager"))
    monkeypatch.setattr(traced, "decide", lambda *_: (True, ""))
    yield shapes
    asleep.wake_all()
    torch.compiler.reset()


def vit() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_dinov3", **SIZES, dynamic_img_size=False).eval()
    images = torch.randn(4, 3, 32, 32)

    def run(batch: int = 1) -> torch.Tensor:
        with torch.no_grad():
            return model(images[:batch])

    return model, run


def ours(model: nn.Module) -> int:
    return sum(hasattr(type(module), "fastkernels") for module in model.modules())


def python_calls(run: Callable[..., Any]) -> int:
    found = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def watched() -> bool:
    begin = vars(torch.cuda.CUDAGraph).get("capture_begin")
    return hasattr(begin, "wakes_before") or "run_start_callbacks" in vars(callback_handler)


def test_eager_calls_cost_few_python_calls() -> None:
    model, run = vit()
    run()
    stock = python_calls(run)
    with fastkernels.patch(model) as report:
        run(), run()
        assert sum(1 for row in report.refresh().rows if row.measured) > 2
        run(), run()
        assert (
            ours(model) == 1 < sum(row.modules for row in report.active)
        )  # it sees the shapes of the images
        assert python_calls(run) <= stock + CALLS
    assert python_calls(run) == stock and not watched()


def test_modules_that_lost_cost_no_python_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_measured", lambda *_: trials.Choice(False, False, "the host's"))
    model, run = vit()
    run()
    stock = python_calls(run)
    with fastkernels.patch(model) as report:
        run(), run()
        assert ours(model) == 0 and python_calls(run) == stock
        row = next(row for row in report.refresh().rows if row.op == "gated_residual")
        assert (row.state, row.modules) == ("off", 0) and "torch.compile measures them again" in row.reason
        assert ours(model)  # blocks, which may become ours in compiled code


def test_capture_of_a_graph_wakes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda self, pool=None: begun.append(pool))
    model, run = vit()
    with fastkernels.patch(model):
        planned = ours(model)
        run(), run()
        assert ours(model) < planned and watched()
        torch.cuda.CUDAGraph.capture_begin(None, pool=3)  # type: ignore[arg-type]
        assert ours(model) == planned and begun == [3] and not watched()
        monkeypatch.setattr(trials, "capturing", lambda x: True)
        kernels = _ops_of(run)
        monkeypatch.undo()
        assert {"gated_residual", "attention_dense", "layer_norm"} <= kernels


def _ops_of(run: Callable[[], Any]) -> set[str]:
    from fastkernels.core.dispatch import OPS

    before = {name: op.calls for name, op in OPS.items()}
    run()
    return {name for name, op in OPS.items() if op.calls > before.get(name, 0)}


@pytest.mark.parametrize("reset", [False, True])
def test_code_compiled_after_eager_calls_is_ours(reset: bool) -> None:
    model, run = vit()
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with fastkernels.patch(model):
        planned, eager = ours(model), run()
        run()
        if reset:
            torch.compiler.reset()  # which removes the callbacks of compilations
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend=backend, fullgraph=True)
        torch.testing.assert_close(run(), eager, atol=1e-4, rtol=1e-4)
        assert any("fastkernels.layer_norm" in name for name in seen) and ours(model) == planned
        before = len(seen)
        run(), run()
        assert len(seen) == before and ours(model) == planned  # guards of compiled code know the classes


def test_other_shapes_wake_and_decide(decided: list[torch.Size]) -> None:
    model, run = vit()
    with fastkernels.patch(model):
        run(), run(), run()
        few, first = ours(model), len(decided)
        run(4)
        assert ours(model) > few and {shape[0] for shape in decided[first:]} == {4}
        both = len(decided)
        run(4), run(1)
        assert ours(model) == few and len(decided) == both


def test_copy_of_sleeping_modules_is_the_hosts() -> None:
    model, run = vit()
    classes, before = [type(m) for m in model.modules()], run()
    with fastkernels.patch(model) as report:
        run(), run()
        block = model.blocks[-1]  # type: ignore[index,union-attr]
        assert not hasattr(type(block), "fastkernels")
        torch.save(block, file := io.BytesIO())
        for copied in (copy.deepcopy(model), [file.seek(0), torch.load(file, weights_only=False)][1]):
            assert not any({FIRST_CALL, TALLY} & vars(m).keys() for m in copied.modules())
        with pytest.raises(fastkernels.patch.PatchError, match="patched already"):
            fastkernels.patch(nn.Sequential(*model.blocks))  # type: ignore[arg-type]
        assert report.active
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)
    assert not any({FIRST_CALL, TALLY} & vars(m).keys() for m in model.modules()) and not watched()


def test_hook_set_while_asleep_stays() -> None:
    """As CPU offload sets one: it calls the host's forward, which an undo must not change."""
    model, run = vit()
    before = run()
    report = fastkernels.patch(model)
    run(), run()
    block = model.blocks[-1]  # type: ignore[index,union-attr]
    theirs = block.forward
    block.forward = lambda *args, **kwargs: theirs(*args, **kwargs)
    run(), asleep.wake_all()
    assert not hasattr(type(block), "fastkernels")
    report.undo()
    del block.forward
    assert torch.equal(run(), before)
