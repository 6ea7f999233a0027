"""The product that decodes 4-bit weights once for several rows: emulated against float64, machine code, plans."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.kernels import emulated_mxfp4_stream

from fastkernels.core import cuda_rtc, registry
from fastkernels.core.spec import Case
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
        scales = torch.randint(121, 126, (experts, n, k // 32), dtype=torch.int32, generator=g).to(
            torch.uint8
        )
        more = torch.randn(experts, n, generator=g).bfloat16()
        return (
            w,
            scales,
            more,
            [mxfp4.dequantize(w[e], scales[e], torch.float64) for e in range(experts)],
            more,
        )
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
        pytest.param(
            64, 2, 3, 128, 288, 2, few.NVFP4, 24, 7, {"rows": 2, "parts": 3}, marks=pytest.mark.slow
        ),
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


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("form", "hidden", "inner"), [(few.MXFP4, 2880, 2880), (few.NVFP4, 2048, 768)])
def test_plans_compile_for_hopper_and_fit(form: int, hidden: int, inner: int) -> None:
    experts = 16
    w1 = torch.empty(experts, 2 * inner, hidden // 2, dtype=torch.uint8, device="meta")
    w2 = torch.empty(experts, hidden, inner // 2, dtype=torch.uint8, device="meta")
    ids = torch.empty(8, 8, dtype=torch.int32, device="meta")
    plans = stream.plans(w1, w2, ids, experts, 1 if form == few.MXFP4 else 2, form)
    assert plans is not None and [p.tokens for p in plans] == [16, 16]
    for p in plans:
        options = ("--gpu-architecture=sm_90a", *p.options)
        assert cuda_rtc.nvrtc_compile(text(few.COMMON, stream.SOURCE), options)[:4] == b"\x7fELF"
        assert p.shared <= few.SHARED and p.stages >= 3


def test_wide_or_odd_matrices_have_no_plan() -> None:
    assert stream.plan(14336, 4096, 1, 0) is None  # registers
    assert stream.plan(64, 72, 1, 0) is None  # rows: not a multiple of 16
    found = stream.plan(4096, 2816, 8, 2, few.NVFP4, 8)
    assert found is not None and found.tokens == 8
    assert stream.plan(4096, 2816, 8, 2, few.NVFP4, 16) is None


GPU_CASES = [
    # format, tokens, topk, experts, hidden, inner, skew of the routing
    ("mxfp4", 64, 4, 32, 2880, 2880, 0.0),
    ("mxfp4", 40, 6, 48, 2048, 1536, 2.0),
    ("mxfp4", 9, 2, 8, 96, 160, 0.0),
    ("nvfp4", 64, 8, 128, 2048, 768, 0.0),
    ("nvfp4", 200, 2, 7, 512, 320, 1.0),
    ("nvfp4", 33, 8, 128, 4096, 1408, 0.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "tokens", "topk", "experts", "hidden", "inner", "skew"), GPU_CASES)
def test_stream_experts_match_the_reference_on_a_gpu(
    kind: str, tokens: int, topk: int, experts: int, hidden: int, inner: int, skew: float
) -> None:
    op = registry.get("fused_experts_swigluoai" if kind == "mxfp4" else "fused_experts_nvfp4")
    dims = {"tokens": tokens, "experts": experts, "topk": topk, "hidden": hidden, "intermediate": inner}
    case = Case("case", {**dims, **({"mxfp4": True} if kind == "mxfp4" else {})}, "bfloat16")
    g = torch.Generator("cuda").manual_seed(0)
    args = list(op.inputs(case, "cuda", g))
    at = 5 if kind == "mxfp4" else 7
    logits = torch.randn(tokens, experts, device="cuda", generator=g)
    logits += skew * torch.randn(experts, device="cuda", generator=g)
    weights, ids = logits.softmax(-1).topk(topk)
    args[at : at + 2] = weights, ids.int()
    name = "mxfp4-stream" if kind == "mxfp4" else "stream"
    (provider,) = (p for p in op.op.providers if p.name == name)
    assert provider.supports is not None and provider.supports(*args) is None
    want = op.reference(args[0].float(), *args[1:])
    got = provider.fn(*args)
    assert ((got.float() - want).norm() / want.norm()).item() < 0.01
    assert torch.equal(got, provider.fn(*args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = provider.fn(*args)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, got)
