"""A sum of vLLM's and our norm behind it become one op in a compiled graph, with the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fk_integrations.vllm.passes.fx_fusions import fuse_quantization
from fk_integrations.vllm.passes.fx_sums import Sums, fuse
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from fastkernels.core import dispatch, parallel
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.collective.all_reduce_rms_norm import all_reduce_rms_norm
from fastkernels.overrides.collective.all_reduce_rms_norm_quant_fp8 import all_reduce_rms_norm_quant_fp8
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.quant.rms_norm_quant_fp8 import rms_norm_quant_fp8

HIDDEN = 64
BYTES = 2 * HIDDEN  # of a token

library = torch.library.Library("vllm", "FRAGMENT")
library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
library.impl("all_reduce", lambda x, name: 2 * x, "CompositeExplicitAutograd")
library.impl("all_reduce", lambda x, name: torch.empty_like(x), "Meta")


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of ours of one rank, whose sums are therefore not doubled; compiler_pass.py sets only_overload, too."""
    monkeypatch.setattr(dispatch, "only_overload", True)
    return parallel.join("alone", 0, 1)


class Pass(CustomGraphPass):
    def __init__(self, sums: dict[str, Sums], least: int) -> None:
        self.sums, self.least, self.fused, self.unchanged = sums, least, 0, Counts()

    def __call__(self, graph: fx.Graph) -> None:
        self.fused += fuse(graph, self.sums, self.least, self.unchanged)

    def uuid(self) -> None:  # None: not cached
        return None


class Block(nn.Module):
    """A sum, a norm, a product. more: the sum has another user; twice: the norm rounds twice."""

    def __init__(self, more: bool = False, twice: bool = False, name: str = "tp:0") -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.norm = nn.Parameter(torch.rand(HIDDEN, generator=made).bfloat16(), requires_grad=False)
        self.weight = nn.Parameter(
            torch.randn(HIDDEN, HIDDEN, generator=made).bfloat16(), requires_grad=False
        )
        self.more, self.twice, self.name = more, twice, name

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        product = x @ self.weight
        summed = (
            all_reduce(product, "alone")
            if self.name == "ours"
            else torch.ops.vllm.all_reduce(product, self.name)
        )
        h = rms_norm(summed.view(-1, HIDDEN), self.norm, 1e-6, residual, None, self.twice)
        out = h @ self.weight
        return (out + summed if self.more else out), (x if residual is None else residual)


def run(
    block: Block, sums: dict[str, Sums], least: int = 1, residual: bool = True, why: str = ""
) -> tuple[int, int]:
    """(fusions, calls of the fused op); values are compared with those of the same sums.

    why: the reason that the pass counts for the sum; '' for none
    """
    torch._dynamo.reset()
    made = torch.Generator().manual_seed(1)
    x = torch.randn(5, HIDDEN, generator=made).bfloat16()
    given = torch.randn(5, HIDDEN, generator=made).bfloat16() if residual else None
    found = Pass(sums, least)
    options: Any = {"enable_auto_functionalized_v2": False, "post_grad_custom_post_pass": found}
    all_reduce_rms_norm.reset()
    mine = None if given is None else given.clone()
    got = torch.compile(block, fullgraph=True, dynamic=True, options=options)(x, mine)
    product = x @ block.weight
    want = None if given is None else given.clone()
    h = rms_norm(
        product if found.fused or block.name == "ours" else 2 * product,
        block.norm,
        1e-6,
        want,
        None,
        block.twice,
    )
    out = h @ block.weight
    torch.testing.assert_close(got[0], out + 2 * product if block.more else out, atol=0.05, rtol=0.02)
    if want is not None:
        torch.testing.assert_close(got[1], want, atol=0.05, rtol=0.02)
    what = "sums of compiled graphs stay apart"
    assert found.unchanged == ({Unchanged("all_reduce", what, why): 1} if why else {})
    return found.fused, all_reduce_rms_norm.calls


OURS = {"tp:0": Sums("alone", 5 * BYTES)}


@pytest.mark.parametrize("name", ["tp:0", "ours"])
@pytest.mark.parametrize("residual", [True, False])
def test_sum_and_norm_become_one_op(residual: bool, name: str) -> None:
    assert run(Block(name=name), OURS, residual=residual) == (1, 1)


@pytest.mark.parametrize(
    ("block", "sums", "least", "why"),
    [
        (Block(more=True), OURS, 1, "the sum has another user"),
        (Block(twice=True), OURS, 1, "the norm rounds twice"),
        (Block(name="tp:1"), OURS, 1, ""),
        (Block(), {}, 1, ""),
        (Block(), OURS, 6, "messages from 6 tokens on are longer than ours"),
    ],
    ids=["another user", "rounds twice", "another group", "no sums of ours", "longer messages"],
)
def test_other_sums_stay_vllms(block: Block, sums: dict[str, Sums], least: int, why: str) -> None:
    assert run(block, sums, least, why=why) == (0, 0)


def test_sum_without_a_norm_is_counted() -> None:
    graph, unchanged = fx.Graph(), Counts()
    summed = graph.call_function(torch.ops.vllm.all_reduce.default, (graph.placeholder("x"), "tp:0"))
    graph.output(graph.call_function(torch.ops.aten.relu.default, (summed,)))
    assert fuse(graph, OURS, 1, unchanged) == 0
    assert [(why, n) for (_, _, why), n in unchanged.items()] == [("no norm of ours follows", 1)]


class Quantized(nn.Module):
    """A sum and a norm in float8. apart: by two ops, as layers of vLLM have them; more: group_size and min_absmax."""

    def __init__(self, apart: bool, scale: bool = False, more: tuple[int, float] = (-1, 1 / 512)) -> None:
        super().__init__()
        self.norm = nn.Parameter(
            torch.rand(HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16(), requires_grad=False
        )
        self.scale = nn.Parameter(torch.tensor([0.02]), requires_grad=False) if scale else None
        self.apart, (self.group, self.least) = apart, more

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        summed = torch.ops.vllm.all_reduce(x + 1, "tp:0").view(-1, HIDDEN)
        if self.apart:
            found = quantize_fp8(rms_norm(summed, self.norm, 1e-6, residual, None, False), None, -1)
        else:
            found = rms_norm_quant_fp8(
                summed, self.norm, 1e-6, self.scale, self.group, residual, None, self.least
            )
        values, scales = found
        return values.float(), scales * 1, x if residual is None else residual


def run_quantized(
    block: Quantized, residual: bool = True, sums: dict[str, Sums] | None = None, least: int = 1
) -> tuple[int, int, Counts]:
    """(fusions, calls of the fused op, what was left); results are compared bit by bit."""
    torch._dynamo.reset()
    made = torch.Generator().manual_seed(1)
    x, given = torch.randn(2, 5, HIDDEN, generator=made).bfloat16()
    found = Pass(OURS if sums is None else sums, least)

    class Both(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            fuse_quantization(graph, Counts())
            found(graph)

        def uuid(self) -> None:
            return None

    options: Any = {"enable_auto_functionalized_v2": False, "post_grad_custom_post_pass": Both()}
    all_reduce_rms_norm_quant_fp8.reset()
    mine, want = (given.clone() if residual else None for _ in range(2))
    got = torch.compile(block, fullgraph=True, dynamic=True, options=options)(x, mine)
    calls = all_reduce_rms_norm_quant_fp8.calls
    summed = (x + 1) * (1 if found.fused else 2)  # the group of one rank does not double
    values, scales = rms_norm_quant_fp8(
        summed, block.norm, 1e-6, block.scale, block.group, want, None, block.least
    )
    assert torch.equal(got[0], values.float()) and torch.equal(got[1], scales)
    assert want is None or torch.equal(got[2], want)
    return found.fused, calls, found.unchanged


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(
    "options", [{"apart": True}, {"apart": False}, {"apart": False, "scale": True}], ids=str
)
def test_sum_and_quantized_norm_become_one_op(options: dict[str, Any], residual: bool) -> None:
    assert run_quantized(Quantized(**options), residual) == (1, 1, {})


@pytest.mark.parametrize(
    ("more", "least", "why"),
    [
        ((16, 1 / 512), 1, "the norm's scales have group_size"),
        ((-1, 0.5), 1, "the norm's scales have min_absmax"),
        ((-1, 1 / 512), 6, "messages from 6 tokens on are longer than ours"),
    ],
)
def test_other_quantized_norms_stay_apart(more: tuple[int, float], least: int, why: str) -> None:
    fused, calls, unchanged = run_quantized(Quantized(False, more=more), least=least)
    what = "sums of compiled graphs stay apart"
    assert (fused, calls, unchanged) == (0, 0, {Unchanged("all_reduce", what, why): 1})


@pytest.mark.parametrize("op", [rms_norm_quant_fp8, all_reduce], ids=lambda op: op.name)
def test_requested_quantized_norm_stays_apart(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_requested", "reference")
    fused, _, unchanged = run_quantized(Quantized(False))
    assert fused == 0 and [why for _, _, why in unchanged] == [f"{op.name}: requested by name"]


def test_requested_norm_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "_requested", "named")
    assert run(Block(), OURS, why="rms_norm: requested by name") == (0, 0)
