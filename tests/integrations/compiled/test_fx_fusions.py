"""A norm or an activation and its quantization become one op in a compiled graph, with the same bits."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from fk_integrations.vllm.passes.fx_fusions import fuse_quantization
from fk_integrations.vllm.passes.unchanged import Counts
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from fastkernels.core import dispatch
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.linear.linear_fp8 import linear_fp8
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.quant.rms_norm_quant_fp8 import rms_norm_quant_fp8
from fastkernels.overrides.quant.silu_mul_quant_fp8 import silu_mul_quant_fp8

OPS = (rms_norm, silu_and_mul, quantize_fp8, rms_norm_quant_fp8, silu_mul_quant_fp8, linear_fp8)
HIDDEN, INNER = 64, 48


@pytest.fixture(autouse=True)
def as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """compiler_pass.py, which imports vLLM, does the same."""
    monkeypatch.setattr(dispatch, "only_overload", True)


class Pass(CustomGraphPass):
    def __init__(self) -> None:
        self.fused: list[int] = []
        self.unchanged = Counts()

    def __call__(self, graph: fx.Graph) -> None:
        self.fused.append(fuse_quantization(graph, self.unchanged))

    def uuid(self) -> None:  # None: not cached
        return None


class Block(nn.Module):
    """Norm, gate and up, activation, down, as in a layer; with `more`, the norm's result has another user."""

    def __init__(self, more: bool = False, group: int = -1, cast: bool | None = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.norm = nn.Parameter(torch.rand(HIDDEN, generator=generator).bfloat16(), requires_grad=False)
        self.more, self.group, self.cast = more, group, cast
        for name, shape in (("up", (2 * INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            weight, scale = quantize_fp8(torch.randn(shape, generator=generator), None, -1)
            setattr(self, name, weight)
            setattr(self, f"{name}_scale", scale.reshape(-1))

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(x.view(-1, x.shape[-1]), None, self.group)  # a view, as vLLM takes one

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        h = rms_norm(x, self.norm, 1e-6, residual, None, self.cast)
        q, scale = self.quantized(h)
        gate_up = linear_fp8(q, self.up, scale, self.up_scale)
        q, scale = self.quantized(silu_and_mul(gate_up))
        out = linear_fp8(q, self.down, scale, self.down_scale)
        return (out + h if self.more else out), (x if residual is None else residual)


def compiled(block: Block) -> tuple[Any, Pass]:
    torch._dynamo.reset()
    found = Pass()
    options: Any = {"enable_auto_functionalized_v2": False, "post_grad_custom_post_pass": found}
    return torch.compile(block, fullgraph=True, dynamic=True, options=options), found


def calls(fn: Any, *args: Any) -> tuple[Any, dict[str, int]]:
    for op in OPS:
        op.reset()
    return fn(*args), {op.name: op.calls for op in OPS if op.calls}


@pytest.mark.parametrize("with_residual", [True, False])
def test_two_ops_become_one_with_the_same_bits(with_residual: bool) -> None:
    block = Block()
    fn, found = compiled(block)
    for tokens in (5, 9):
        x = torch.randn(tokens, HIDDEN).bfloat16()
        residual = torch.randn(tokens, HIDDEN).bfloat16() if with_residual else None
        want, _ = calls(block, x.clone(), None if residual is None else residual.clone())
        got, ran = calls(fn, x.clone(), None if residual is None else residual.clone())
        assert ran == {"rms_norm_quant_fp8": 1, "silu_mul_quant_fp8": 1, "linear_fp8": 2}
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert found.fused and set(found.fused) == {2} and not found.unchanged


def test_result_with_another_user_is_not_fused() -> None:
    block = Block(more=True)
    fn, found = compiled(block)
    x, residual = torch.randn(2, 5, HIDDEN).bfloat16()
    want, _ = calls(block, x.clone(), residual.clone())
    got, ran = calls(fn, x.clone(), residual.clone())
    assert ran == {
        "rms_norm": 1,
        "quantize_fp8": 1,
        "silu_mul_quant_fp8": 1,
        "linear_fp8": 2,
    } and found.fused == [1]
    assert reasons(found.unchanged) == {"what is quantized has another user": 1}
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def reasons(unchanged: Counts) -> dict[str, int]:
    """{why: how many quantizations the pass has left}."""
    assert {(op, what) for op, what, _ in unchanged} <= {
        ("linear_fp8", "quantizations of compiled graphs stay apart")
    }
    return {why: n for (_, _, why), n in unchanged.items()}


@pytest.mark.parametrize(
    ("options", "fused", "why"),
    [
        ({"group": 16}, 0, {"a scale is not per token": 2}),
        ({"cast": True}, 1, {"the norm rounds twice": 1}),
        ({"cast": None}, 1, {"the norm rounds twice": 1}),
    ],
)
def test_unsupported_patterns_are_not_fused(options: dict[str, Any], fused: int, why: dict[str, int]) -> None:
    graph, unchanged = two_quantizations(**options), Counts()
    assert fuse_quantization(graph, unchanged) == fused
    assert reasons(unchanged) == why
    graph.lint()


def test_quantization_of_another_op_is_counted() -> None:
    graph, unchanged = fx.Graph(), Counts()
    x = graph.placeholder("x")
    source = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output(graph.call_function(torch.ops.fastkernels.quantize_fp8.default, (source, None, -1)))
    assert fuse_quantization(graph, unchanged) == 0
    assert reasons(unchanged) == {"what is quantized is of aten.relu.default": 1}


@pytest.mark.parametrize(("named", "fused"), [(None, 2), (rms_norm, 1), (silu_and_mul, 1), (quantize_fp8, 0)])
def test_requested_ops_are_not_fused(named: Any, fused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate would not run inside the fused op, but would be reported."""
    unchanged = Counts()
    if named is not None:
        monkeypatch.setattr(named, "_requested", "named")
    assert fuse_quantization(two_quantizations(), unchanged) == fused
    assert reasons(unchanged) == ({f"{named.name} is requested by name": 2 - fused} if named else {})


def two_quantizations(**options: Any) -> fx.Graph:
    block = Block(**options)
    graph = fx.Graph()
    x = graph.placeholder("x")
    args = (torch.ops.fastkernels.rms_norm.default,)
    kwargs = {"x": x, "weight": x, "eps": 1e-6, "residual": x}
    kwargs |= {} if block.cast is None else {"cast_x_before_out_mul": block.cast}
    norm = graph.call_function(torch.ops.higher_order.auto_functionalized, args, kwargs)
    quantize = torch.ops.fastkernels.quantize_fp8.default
    a = graph.call_function(quantize, (graph.call_function(operator.getitem, (norm, 0)), None, block.group))
    b = graph.call_function(
        quantize, (graph.call_function(torch.ops.fastkernels.silu_and_mul.default, (x,)), None, block.group)
    )
    graph.output((*(graph.call_function(operator.getitem, (a, i)) for i in (0, 1)), b))
    return graph
