"""The product that decodes 4-bit weights once for several rows: emulated against float64, machine code, plans."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.kernels import emulated_mxfp4_stream

from fastkernels.core import cuda_rtc
from fastkernels.overrides.activation import swigluoai_and_mul as swiglu
from fastkernels.overrides.kit import mxfp4
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear.linear_nvfp4 import dequantize_nvfp4
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe import mxfp4_stream as stream
from fastkernels.overrides.moe.sorted_pairs import Sorted, sort_pairs
from fastkernels.overrides.routing.moe_align import moe_align, padded_size

ALPHA, LIMIT = 1.5, 0.75


def _matrices(
    experts: int, n: int, k: int, form: int, g: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return weights, scales, what they have in addition, the matrices in float64 and their biases."""
    w = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=g)
    if form == few.MXFP4:
        scales = torch.randint(121, 126, (experts, n, k // 32), dtype=torch.int32, generator=g).to(torch.uint8)
        more = torch.randn(experts, n, generator=g).bfloat16()
        return w, scales, more, [mxfp4.dequantize(w[e], scales[e], torch.float64) for e in range(experts)], more
    scales = torch.randint(0, 127, (experts, n, k // 16), dtype=torch.uint8, generator=g).view(FP8)
    more = (torch.rand(experts, n, generator=g) + 0.5) * 0.003 * k**-0.5
    matrices = [dequantize_nvfp4(w[e], scales[e], more[e].double(), torch.float64) for e in range(experts)]
    return w, scales, more, matrices, torch.zeros(experts, n)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "n", "k", "glu", "form", "block", "grid", "params"),
    [
        # shares begin within experts; the last step has a quarter of its columns; one and two tiles of tokens
        (23, 2, 3, 64, 160, 1, few.MXFP4, 16, 5, {"rows": 1, "parts": 2}),
        (23, 2, 3, 96, 544, 0, few.MXFP4, 16, 3, {"rows": 2, "parts": 2}),  # a part has fewer steps
        (40, 1, 2, 64, 96, 0, few.MXFP4, 32, 2, {"rows": 1, "parts": 1}),
        (23, 2, 3, 96, 1024, 2, few.NVFP4, 16, 4, {"rows": 1, "parts": 4}),  # rows of scales are apart
        (9, 2, 5, 64, 96, 0, few.NVFP4, 8, 64, {"rows": 4, "parts": 1}),  # more blocks than tiles
        pytest.param(64, 2, 3, 128, 288, 2, few.NVFP4, 24, 7, {"rows": 2, "parts": 3}, marks=pytest.mark.slow),
    ],
)
def test_emulated_product_matches_float64(
    tokens: int, topk: int, experts: int, n: int, k: int, glu: int, form: int, block: int, grid: int,
    params: dict[str, int], tmp_path: Path,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(tokens + n)
    w, scales, more, matrices, bias = _matrices(experts, n, k, form, g)
    likely = torch.tensor([4.0] + [1.0] * (experts - 1)).repeat(tokens, 1)
    ids = torch.multinomial(likely, topk, generator=g).int()
    x = torch.randn(tokens if glu else tokens * topk, k, generator=g).bfloat16()
    weights = torch.rand(tokens * topk, generator=g)
    pairs = sort_pairs(ids, experts, None, block)
    p = stream.plan(k, n, topk if glu else 1, glu, form, block, stages=3, **params)
    assert p is not None
    got = emulated_mxfp4_stream.product(x, w, scales, more, pairs, p, weights, ALPHA, LIMIT, grid, tmp_path)
    for pair, expert in enumerate(ids.flatten().tolist()):
        want = matrices[expert] @ x[pair // p.topk].double() + bias[expert].double()
        if glu == 1:
            want = swiglu.reference(want, ALPHA, LIMIT)
        elif glu:
            gate, up = want.chunk(2)
            want = torch.nn.functional.silu(gate) * up
        else:
            want = want * weights[pair].double()
        torch.testing.assert_close(got[pair].double(), want, rtol=0.01, atol=0.01)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_rows_without_a_local_expert_stay_unwritten(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    w, scales, more, _, _ = _matrices(2, 32, 64, few.MXFP4, g)
    ids = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(6)]).int()
    local = torch.tensor([0, -1, 1, -1], dtype=torch.int32)
    capacity = -(-padded_size(ids.numel(), 8, 4) // 8) * 8
    made = moe_align.run(ids, 8, 4, capacity, local, False)
    pairs = Sorted(made[0], made[1], made[2], ids.numel(), 2, made[1].numel())
    p = stream.plan(64, 32, 1, 0, tokens=8, rows=1, stages=3)
    assert p is not None
    x, one = torch.ones(ids.numel(), 64).bfloat16(), torch.ones(ids.numel())
    got = emulated_mxfp4_stream.product(x, w, scales, more, pairs, p, one, ALPHA, LIMIT, 3, tmp_path)
    assert torch.equal(got.isnan().all(1), local[ids.flatten().long()] < 0)
