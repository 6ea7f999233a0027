"""Sharded layers over two real processes (gloo): equal to the unsharded ones, and each rank holds its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from fastkernels.core import parallel
from fastkernels.overrides.block.sglang import SGLangLlamaMLP
from fastkernels.overrides.block.vllm import VllmLlamaMLP
from fastkernels.overrides.embedding.sglang import SGLangVocabParallelEmbedding
from fastkernels.overrides.embedding.vllm import (
    VllmLogitsProcessor,
    VllmParallelLMHead,
    VllmVocabParallelEmbedding,
)
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)

SIZE = 2


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def load(module: torch.nn.Module, name: str, value: torch.Tensor, *shard_id: object) -> None:
    param = dict(module.named_parameters())[name]
    param.weight_loader(param, value, *shard_id)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def check_collectives(rank: int) -> None:
    assert (parallel.get_tp_rank(), parallel.get_tp_size()) == (rank, SIZE)
    close(parallel.all_reduce(torch.full((3,), rank + 1.0)), torch.full((3,), 3.0))
    gathered = parallel.all_gather(torch.full((2, 3), float(rank)).t(), -1)  # not contiguous
    close(gathered, torch.tensor([0.0, 0, 1, 1]).expand(3, 4))
    close(parallel.all_gather(torch.full((1, 2), float(rank)), 0), torch.tensor([[0.0, 0], [1, 1]]))


@torch.inference_mode()
def check_mlp(cls: type, reduce: bool) -> None:
    hidden, inner = 36, 26
    gate, up, down = randn(inner, hidden, seed=1), randn(inner, hidden, seed=2), randn(hidden, inner, seed=3)
    x = randn(7, hidden)
    mlp = cls(hidden, inner, "silu", reduce_results=reduce)
    assert mlp.gate_up_proj.weight.shape == (inner, hidden)
    load(mlp, "gate_up_proj.weight", gate, 0)
    load(mlp, "gate_up_proj.weight", up, 1)
    load(mlp, "down_proj.weight", down)
    out = mlp(x)
    out = out if reduce else parallel.all_reduce(out)
    close(out / inner, (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t() / inner)


@torch.inference_mode()
def check_linear(rank: int) -> None:
    weight, bias, x = randn(10, 12, seed=1), randn(10, seed=2), randn(3, 12)
    column = VllmColumnParallelLinear(12, 10, gather_output=True)
    load(column, "weight", weight)
    load(column, "bias", bias)
    close(column.bias, bias[5 * rank : 5 * rank + 5])
    close(column(x)[0], x @ weight.t() + bias)
    row = VllmRowParallelLinear(12, 10, input_is_parallel=False, return_bias=False)
    load(row, "weight", weight)
    load(row, "bias", bias)
    assert row.weight.shape == (10, 6)
    close(row(x), x @ weight.t() + bias)
    alone = VllmColumnParallelLinear(12, 10, disable_tp=True)
    assert (alone.tp_rank, alone.tp_size, alone.weight.shape) == (0, 1, (10, 12))
    with pytest.raises(ValueError, match=r"weight of shape \(9, 12\) does not fit, expected 10"):
        load(column, "weight", weight[:9])
    with pytest.raises(ValueError, match="11 cannot be divided over 2"):
        VllmColumnParallelLinear(12, 11)


@torch.inference_mode()
def check_qkv(rank: int, heads: int, kv_heads: int) -> None:
    hidden, size = 20, 6
    q, k, v = (randn(n * size, hidden, seed=n) for n in (heads, kv_heads, kv_heads + 100))
    v = v[: kv_heads * size]
    qkv = VllmQKVParallelLinear(hidden, size, heads, kv_heads, bias=False, return_bias=False)
    for name, part in zip("qkv", (q, k, v), strict=True):
        load(qkv, "weight", part, name)
    per_q, per_kv = heads // SIZE, max(1, kv_heads // SIZE)
    kv = slice(0, size) if kv_heads < SIZE else slice(rank * per_kv * size, (rank + 1) * per_kv * size)
    mine = torch.cat((q[rank * per_q * size : (rank + 1) * per_q * size], k[kv], v[kv]))
    assert torch.equal(qkv.weight, mine)
    packed = VllmQKVParallelLinear(hidden, size, heads, kv_heads, bias=False)
    load(packed, "weight", torch.cat((q, k, v)))
    assert torch.equal(packed.weight, mine)
    x = randn(3, hidden, seed=9)
    close(qkv(x), x @ mine.t())


@torch.inference_mode()
def check_vocabulary(rank: int) -> None:
    vocab, dim = 1010, 24
    table = randn(vocab, dim, seed=5)
    ids = torch.tensor([[0, 511, 512, 1009], [3, 700, 504, 505]])
    for cls in (VllmVocabParallelEmbedding, SGLangVocabParallelEmbedding):
        embed = cls(vocab, dim)
        load(embed, "weight", table)
        assert embed.weight.shape == (512, dim)
        assert torch.equal(embed(ids), table[ids])
    assert rank == 0 or not embed.weight[498:].any()
    head = VllmParallelLMHead(vocab, dim, bias=True).tie_weights(embed)
    assert head.weight is embed.weight
    hidden = randn(5, dim, seed=6)
    logits = VllmLogitsProcessor(vocab, soft_cap=3.0, scale=0.5)
    close(logits(head, hidden), torch.tanh(hidden @ table.t() / 3.0) * 1.5)
    assert logits(head, hidden, skip_gather=True).shape == (5, 512)
    # 16 added (LoRA) ids behind the original ones, as a padded part of their own.
    added = VllmVocabParallelEmbedding(vocab + 16, dim, org_num_embeddings=vocab, reduce_results=False)
    added.weight.data.copy_(randn(544, dim, seed=7 + rank))
    mine = added(torch.tensor([1010, 1025, 2]))
    expected = added.weight[[512, 527, 2]] if rank == 0 else torch.zeros(3, dim)
    assert torch.equal(mine, expected)


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    parallel.init(rank, SIZE, f"file://{store}")
    check_collectives(rank)
    check_linear(rank)
    for cls in (VllmLlamaMLP, SGLangLlamaMLP):
        check_mlp(cls, reduce=True)
        check_mlp(cls, reduce=False)
    for heads, kv_heads in ((4, 2), (4, 1), (6, 6)):
        check_qkv(rank, heads, kv_heads)
    check_vocabulary(rank)
    with pytest.raises(ValueError, match="already initialized as rank"):
        parallel.init(1 - rank, SIZE)
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(180)
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path / "store"),), nprocs=SIZE)


def test_single_rank_and_bound_group() -> None:
    assert (parallel.get_tp_rank(), parallel.get_tp_size()) == (0, 1)
    t = torch.ones(3)
    assert parallel.all_reduce(t) is t and parallel.all_gather(t, 0) is t
    with pytest.raises(ValueError, match="rank 2 is not in a group of size 2"):
        parallel.bind(2, 2, lambda t: t, lambda t, dim: t)
    try:
        parallel.bind(1, 2, lambda t: 2 * t, lambda t, dim: torch.cat((t, t), dim))
        close(parallel.all_reduce(t), 2 * t)
        assert parallel.all_gather(t, 0).shape == (6,)
        assert VllmColumnParallelLinear(4, 6, bias=False).weight.shape == (3, 4)
    finally:
        parallel.reset()
    assert parallel.get_tp_size() == 1
