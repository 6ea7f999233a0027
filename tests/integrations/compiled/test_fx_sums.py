"""A sum of vLLM's and our norm behind it become one op in a compiled graph, with the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fk_integrations.vllm.passes.fx_sums import Sums, fuse
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from fastkernels.core import dispatch, parallel
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.collective.all_reduce_rms_norm import all_reduce_rms_norm
from fastkernels.overrides.norm.rms_norm import rms_norm

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


def test_requested_norm_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "_requested", "named")
    assert run(Block(), OURS, why="rms_norm: requested by name") == (0, 0)
