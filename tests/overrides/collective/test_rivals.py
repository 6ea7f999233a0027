"""Baselines of collectives: what the hosts run between ranks, and the reason of one that cannot run."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fk_bench.core.baselines import baselines
from support import ranks

from fastkernels.core import parallel, registry
from fastkernels.overrides.collective import all_reduce_rms_norm, production
from fastkernels.overrides.expert_parallel.production import BASELINES

GPU = {
    "all_reduce_rms_norm": {"vllm_then_inductor", "sglang_then_inductor", "flashinfer"},
    "all_gather_linear": {"symm_mem"},
    "linear_reduce_scatter": {"symm_mem"},
    "all_reduce_rms_norm_quant_fp8": {"vllm", "flashinfer"},
    "ep_dispatch": {"vllm", "deepep"},
    "ep_combine": {"vllm", "deepep"},
}


# Rivals that take no call, and what they say
DECLARED = {"flashinfer": "multicast", "deepep": "was not tried"}


@pytest.mark.parametrize(("op", "names"), GPU.items())
def test_rivals_of_collectives_are_baselines(op: str, names: set[str]) -> None:
    found = {b.name: b for b in baselines(op, "production", "cuda")}
    assert names <= found.keys()
    for name in names - {"symm_mem", *DECLARED}:
        said = found[name].available()
        assert said is None or f"needs {name.partition('_')[0]}, which is not installed" in said


@pytest.mark.parametrize("op", registry.collective_names())
def test_declared_rivals_give_their_reason(op: str) -> None:
    found = [b for b in baselines(op, "production", "cuda") if b.name in DECLARED]
    for one in found:
        assert DECLARED[one.name] in str(one.supports(torch.ones(2, 8)))
    of = {"expert_parallel": ["deepep"], "collective": ["flashinfer"] * ("norm" in op and "all_reduce" in op)}
    assert [b.name for b in found] == of[registry.family(op)]


@pytest.mark.parametrize("residual", [False, True])
def test_compiled_norm_updates_the_residual(residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(production, "inductor_compiled", lambda fn: compiled.append(fn) or fn)
    op = production._then_norm(lambda: lambda x, group: 2 * x, production._compiled_norm)()
    made = torch.Generator().manual_seed(0)
    x, added = (torch.randn(3, 64, generator=made) for _ in range(2))
    weight = torch.randn(64, generator=made)
    given = added.clone() if residual else None
    out = op(x, weight, 1e-5, given)
    ((want, summed), _) = all_reduce_rms_norm.reference(
        [x, x], [weight] * 2, 1e-5, [added, added] if residual else None
    )
    torch.testing.assert_close(out, want)
    assert len(compiled) == 1 and (given is None or torch.equal(given, summed))


def test_pieces_need_rows_for_all_ranks() -> None:
    x, weight = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(8, 64, dtype=torch.bfloat16)
    assert production._not_pipelined(x, weight) is None  # of one rank
    assert "contiguous rows" in str(production._not_pipelined(x[:0], weight))
    assert "rows of a multiple of 16 bytes" in str(production._not_pipelined(x[:, :3].contiguous(), weight))


class Nccl:
    """The calls of vLLM's communicator, over gloo."""

    def __init__(self, group: Any, device: torch.device):
        self.group, self.size, self.calls = group, dist.get_world_size(group), list[str]()

    def group_start(self) -> None:
        self.calls.append("start")

    def group_end(self) -> None:
        self.calls.append("end")

    def all_gather(self, into: torch.Tensor, x: torch.Tensor) -> None:
        assert self.calls[-1] == "start"
        dist.all_gather_into_tensor(into, x, group=self.group)

    def reduce_scatter(self, into: torch.Tensor, x: torch.Tensor) -> None:
        summed = x.clone()
        dist.all_reduce(summed, group=self.group)
        into.copy_(summed.chunk(self.size)[dist.get_rank(self.group)])


def _exchange(rank: int) -> None:
    module: Any = ModuleType("vllm.distributed.device_communicators.pynccl")
    module.PyNcclCommunicator = Nccl
    parts = module.__name__.split(".")
    for i in range(1, len(parts)):
        sys.modules[".".join(parts[:i])] = ModuleType(parts[i - 1])
    sys.modules[module.__name__] = module
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(5, 16, generator=made)
    ids = torch.randint(-1, 8, (5, 2), generator=made, dtype=torch.int32)
    weights = torch.rand(5, 2, generator=made)
    ways = {op: {b.name: b.make() for b in BASELINES[op]} for op in ("ep_dispatch", "ep_combine")}
    theirs, ours = (
        ways["ep_dispatch"][name](x, ids, weights, 8, parallel.TP) for name in ("vllm", "composed")
    )
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)) and len(theirs) == 4
    back = [ways["ep_combine"][name](ours[0], ours[3], parallel.TP) for name in ("vllm", "composed")]
    assert torch.equal(*back) and back[0].shape == x.shape


def test_vllms_exchange_of_tokens_gives_what_ours_gives() -> None:
    assert ranks.run(2, _exchange) == [None, None]
