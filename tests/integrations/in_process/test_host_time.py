"""The CPU time of a call decides whether compiled code keeps ours: without CUDA graphs it is part of each step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import fastkernels
from fastkernels.core import tuning
from fastkernels.overrides.kit.chips import H100
from fastkernels.verify import host_time

timm = pytest.importorskip("timm")


def after(seconds: float) -> Any:
    return lambda: time.sleep(seconds)


@pytest.mark.parametrize(("ours", "plain", "slower"), [(0.0, 1e-3, False), (1e-3, 0.0, True)])
def test_worst_case_decides_about_a_calls_cpu_time(
    ours: float, plain: float, slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [("small", after(1e-4), after(2e-4)), ("large", after(ours), after(plain))]
    monkeypatch.setattr(host_time, "_calls", lambda op, device: iter(cases))
    found = host_time.slower_to_call.__wrapped__("linear_gelu", torch.device("cuda", 0))
    assert (found is not None) == slower and (found is None or "linear_gelu, case large" in found)


def test_op_that_cannot_be_timed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(op: str, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(host_time, "_calls", fails)
    found = host_time.slower_to_call.__wrapped__("linear_gelu", torch.device("cuda", 0))
    assert found is not None and "OutOfMemoryError: no memory" in found


@pytest.mark.parametrize("reason", [None, "a call takes 90 us of the CPU"])
def test_compiled_code_is_the_hosts_if_calls_take_longer(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setattr(tuning, "chip_of", lambda device: H100)
    monkeypatch.setattr(
        host_time, "slower_to_call", lambda op, device: reason if op == "linear_gelu" else None
    )
    sizes = {"img_size": 32, "embed_dim": 64, "depth": 1, "num_heads": 2, "num_classes": 0}
    model, seen = timm.create_model("vit_tiny_patch16_224", act_layer="gelu_tanh", **sizes).eval(), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with fastkernels.patch(model) as report, torch.no_grad():
        model.blocks[0].mlp.compile(backend=backend, fullgraph=True)
        model.blocks[0].mlp(torch.randn(1, 5, 64))
        (row,) = [row for row in report.refresh().rows if row.op == "linear_gelu" and row.modules]
    assert any("linear_gelu" in name for name in seen) == (reason is None)
    text = "compiled code is ours" + (f" in CUDA graphs only: {reason}" if reason else "")
    assert row.measured == [f"linear_gelu {text}"]
    torch.compiler.reset()
