"""The MXFP4 product for many rows in CUDA C++: the emulated kernel against float64, its layouts, its machine code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support.kernels import emulated_mxfp4_prompt as emulated
from support.kernels import warm

from fastkernels.core import cuda_rtc
from fastkernels.overrides.activation import swigluoai_and_mul as swiglu
from fastkernels.overrides.kit import mxfp4
from fastkernels.overrides.moe import mxfp4_prompt as many
from fastkernels.overrides.moe.fused_experts_swigluoai import fused_experts_swigluoai
from fastkernels.overrides.routing.moe_align import moe_align, padded_size
from fastkernels.overrides.routing.sorted_pairs import Sorted, sort_pairs

ALPHA, LIMIT = 1.5, 0.75


def order(k: int) -> torch.Tensor:
    """The columns of `in_order`: each lane of four holds a quarter of 64, eight of them at a time, i next to i + 4."""
    return torch.arange(k).view(-1, 4, 2, 2, 4).permute(0, 2, 4, 1, 3).flatten()  # lane, word, half, pair


def _data(tokens: int, topk: int, experts: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens + n)
    w = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(121, 126, (experts, n, k // 32), dtype=torch.int32, generator=g).to(torch.uint8)
    bias = torch.randn(experts, n, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(tokens)]).int()
    return w, scales, bias, ids, torch.rand(tokens * topk, generator=g)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "n", "k", "glu", "grid", "params"),
    [
        # all sizes of a multiplication, a block of two experts' tiles, a last tile for one warpgroup
        (150, 2, 3, 384, 192, True, 2, {}),
        (40, 2, 3, 320, 128, False, 2, {}),  # one warpgroup's rows end within it
        pytest.param(
            200, 1, 3, 256, 64, True, 3, {}, marks=pytest.mark.slow
        ),  # fewer steps than the ring holds
        pytest.param(300, 1, 2, 448, 448, False, 1, {"stages": 3, "skew": 2}, marks=pytest.mark.slow),
    ],
)
def test_emulated_product_matches_float64(
    tokens: int, topk: int, experts: int, n: int, k: int, glu: bool, grid: int, params: dict[str, int], tmp_path: Path
) -> None:  # fmt: skip
    w, scales, bias, ids, weights = _data(tokens, topk, experts, n, k)
    rows = tokens if glu else tokens * topk
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    pairs = sort_pairs(ids, experts, None, many.TOKENS)
    p = many.Plan(k, topk if glu else 1, glu, **params)
    ordered = x[:, order(k)]
    got = emulated.product(ordered, w, scales, bias, pairs, p, weights, ALPHA, LIMIT, grid, tmp_path)
    for pair, expert in enumerate(ids.flatten().tolist()):
        matrix = mxfp4.dequantize(w[expert], scales[expert], torch.float64)
        want = matrix @ x[pair // p.topk].double() + bias[expert].double()
        want = swiglu.reference(want, ALPHA, LIMIT)[order(n // 2)] if glu else want * weights[pair].double()
        torch.testing.assert_close(got[pair].double(), want, rtol=0.01, atol=0.01)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_rows_without_a_local_expert_stay_unwritten(tmp_path: Path) -> None:
    w, scales, bias, ids, weights = _data(6, 2, 4, 64, 64)
    local = torch.tensor([0, -1, 1, -1], dtype=torch.int32)
    capacity = -(-padded_size(ids.numel(), many.TOKENS, 4) // many.TOKENS) * many.TOKENS
    made = moe_align.run(ids, many.TOKENS, 4, capacity, local, False)
    pairs = Sorted(made[0], made[1], made[2], ids.numel(), 2, made[1].numel())
    x, p = torch.ones(ids.numel(), 64).bfloat16(), many.Plan(64, 1, False)
    got = emulated.product(x, w[:2], scales[:2], bias[:2], pairs, p, weights, ALPHA, LIMIT, 2, tmp_path)
    assert torch.equal(got.isnan().all(1), local[ids.flatten().long()] < 0)


IN_ORDER = """
import torch
from fastkernels.overrides.moe import mxfp4_prompt as many
for k in (64, 128, 192, 2880):
    torch.save(many.in_order(torch.arange(3 * k).float().view(3, k)), f"{k}.pt")
"""


def test_columns_are_in_the_order_of_lanes(tmp_path: Path) -> None:
    done = warm.run(["-c", IN_ORDER], {**os.environ, "TRITON_INTERPRET": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for k in (64, 128, 192, 2880):
        x = torch.arange(3 * k).float().view(3, k)
        assert torch.equal(torch.load(tmp_path / f"{k}.pt"), x[:, order(k)])
    assert order(2880).sort().values.equal(torch.arange(2880))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("glu", [pytest.param(True, marks=pytest.mark.slow), False])
def test_prompt_kernels_compile_for_hopper(glu: bool) -> None:
    p = many.Plan(2880, 4 if glu else 1, glu)
    assert cuda_rtc.nvrtc_compile(many.source(), ("--gpu-architecture=sm_90a", *p.options))[:4] == b"\x7fELF"
    assert p.shared < 226 * 1024 and p.skew < p.stages


def test_unsupported_matrices_name_the_reason() -> None:
    w, scales, bias, _, _ = _data(1, 1, 2, 64, 64)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    assert many.refused(x, w, scales, bias, "w1") is None
    assert "not MXFP4" in str(many.refused(x, w, None, bias, "w1"))
    narrow = w[:, :, :16].contiguous(), scales[:, :, :1].contiguous()
    assert many.refused(x, *narrow, bias, "w2") == "rows of w2 have 32 weights, not a multiple of 64"


@pytest.mark.parametrize(("hidden", "inner"), [(96, 64), (64, 96)])
def test_op_refuses_many_rows_of_other_sizes(hidden: int, inner: int) -> None:
    (provider,) = (p for p in fused_experts_swigluoai.providers if p.name == "mxfp4-cuda")
    w1, s1, b1, ids, weights = _data(100, 2, 3, 2 * inner, hidden)
    w2, s2, b2, _, _ = _data(100, 2, 3, hidden, inner)
    x, weights = torch.empty(100, hidden, dtype=torch.bfloat16), weights.view(100, 2)
    reason = provider.supports(x, w1, w2, b1, b2, weights, ids, s1, s2)
    assert "have 96 weights, not a multiple of 64" in str(reason)
