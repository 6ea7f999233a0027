"""The grouped MXFP4 product in CUDA C++: the emulated kernel against float64, its machine code, unsupported calls."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support.kernels import emulated_mxfp4, warm

from fastkernels.core import cuda_rtc
from fastkernels.overrides.activation import swigluoai_and_mul as swiglu
from fastkernels.overrides.kit import mxfp4
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear.linear_int4 import dequantize_int4
from fastkernels.overrides.linear.linear_nvfp4 import dequantize_nvfp4
from fastkernels.overrides.moe import fused_experts_int4 as int4
from fastkernels.overrides.moe import fused_experts_nvfp4 as nvfp4
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.routing.moe_align import moe_align, padded_size
from fastkernels.overrides.routing.sorted_pairs import Sorted, sort_pairs

ALPHA, LIMIT = 1.5, 0.75


def _data(tokens: int, topk: int, experts: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens + n)
    w = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(121, 126, (experts, n, k // 32), dtype=torch.int32, generator=g).to(torch.uint8)
    bias = torch.randn(experts, n, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(tokens)]).int()
    return w, scales, bias, ids


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "n", "k", "glu", "params"),
    [
        (
            11,
            2,
            3,
            80,
            192,
            True,
            {"rows": 2, "parts": 1},
        ),  # several blocks of an expert, a last one of fewer rows
        # fewer steps than parts
        pytest.param(11, 2, 3, 72, 96, False, {"rows": 1, "parts": 2}, marks=pytest.mark.slow),
        pytest.param(5, 3, 4, 64, 416, False, {"rows": 2, "parts": 3, "ahead": 1}, marks=pytest.mark.slow),
        # scales begin between words, the last tile within the one before, and steps end within a turn
        (7, 2, 5, 34, 1184, True, {"rows": 1, "parts": 2}),
        (7, 2, 5, 72, 1184, False, {"rows": 3, "parts": 3, "ahead": 2}),
        (1, 3, 16, 80, 288, True, {}),  # pairs are not sorted
        (1, 4, 16, 40, 160, False, {}),
    ],
)
def test_emulated_mxfp4_product_matches_float64(
    tokens: int, topk: int, experts: int, n: int, k: int, glu: bool, params: dict[str, int], tmp_path: Path
) -> None:  # fmt: skip
    w, scales, bias, ids = _data(tokens, topk, experts, n, k)
    x = torch.randn(
        tokens if glu else tokens * topk, k, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    weights = torch.rand(tokens * topk, generator=torch.Generator().manual_seed(2))
    pairs = sort_pairs(ids, experts, None, few.TOKENS)
    p = few.plan(k, topk if glu else 1, pairs.pairs is not None, glu, **params)
    got = emulated_mxfp4.product(x, w, scales, bias, pairs, p, weights, ALPHA, LIMIT, tmp_path)
    for pair, expert in enumerate(ids.flatten().tolist()):
        matrix = mxfp4.dequantize(w[expert], scales[expert], torch.float64)
        want = matrix @ x[pair // p.topk].double() + bias[expert].double()
        want = swiglu.reference(want, ALPHA, LIMIT) if glu else want * weights[pair].double()
        torch.testing.assert_close(got[pair].double(), want, rtol=0.01, atol=0.01)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("form", "count", "n", "k", "glu", "blocks"),
    [
        # two tiles of pairs in some blocks and one in others, whose activations come in two phases
        pytest.param(few.MXFP4, 20, 48, 416, 0, "16 2x2/1/2", marks=pytest.mark.slow),
        (few.NVFP4, 30, 48, 1184, 2, "24 2x1/2/2"),  # one to three tiles
        pytest.param(few.MXFP4, 30, 34, 672, 1, "32 1x3/3/1", marks=pytest.mark.slow),
        pytest.param(few.NVFP4, 70, 32, 1056, 0, "32 2x1/1/3", marks=pytest.mark.slow),
    ],
)
def test_blocks_of_more_pairs_give_the_same_bits(
    form: int, count: int, n: int, k: int, glu: int, blocks: str, tmp_path: Path
) -> None:
    w, scales, more, ids = _data(count, 2, 3, n, k)
    g = torch.Generator().manual_seed(0)
    if form == few.NVFP4:
        scales = (torch.rand(3, n, k // 16, generator=g) * 0.2 * k**-0.5).to(FP8)
        more = torch.rand(3, n, generator=g) + 0.5
    x, weights = (
        torch.randn(count if glu else 2 * count, k, generator=g).bfloat16(),
        torch.rand(2 * count, generator=g),
    )
    made = few.Blocks.parsed(f"{blocks} {blocks.split()[1]}").plans(k, 2, k, glu, form)[0 if glu else 1]
    assert made.phases > 1 or made.parts > 1
    got = {}
    for p in (made, made._replace(tokens=8, ring=False, phases=1)):
        pairs = sort_pairs(ids, 3, None, p.tokens)
        got[p.tokens] = emulated_mxfp4.product(x, w, scales, more, pairs, p, weights, ALPHA, LIMIT, tmp_path)
    assert ids.flatten().bincount().max() > 8 and torch.equal(got[made.tokens], got[8])
    for pair, expert in enumerate(ids.flatten().tolist()):
        if form == few.NVFP4:
            want = dequantize_nvfp4(w[expert], scales[expert], more[expert].double(), torch.float64)
        else:
            want = mxfp4.dequantize(w[expert], scales[expert], torch.float64)
        want = want @ x[pair // made.topk].double() + (0 if form == few.NVFP4 else more[expert].double())
        if glu == 1:
            want = swiglu.reference(want, ALPHA, LIMIT)
        elif glu == 2:
            gate, up = want.chunk(2)
            want = torch.nn.functional.silu(gate) * up
        else:
            want = want * weights[pair].double()
        torch.testing.assert_close(got[made.tokens][pair].double(), want, rtol=0.01, atol=0.01)


def test_text_of_blocks_is_read_back_or_refused() -> None:
    blocks = few.Blocks(16, few.Block(6, 1, 3, 2), few.Block(4, 2, 3, 1))
    assert str(blocks) == "16 6x1/3/2 4x2/3/1" and few.Blocks.parsed(str(blocks)) == blocks
    with pytest.raises(ValueError, match="'16 6x1' must be as in '16 10x1/3/2 8x1/3/1'"):
        few.Blocks.parsed("16 6x1")


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_every_code_is_exact_with_scales_of_any_size(tmp_path: Path) -> None:
    n, k = 32, 64
    w = torch.arange(256, dtype=torch.uint8).repeat(4).view(1, n, k // 2)
    scales = torch.linspace(72, 192, n).int().to(torch.uint8)[:, None].repeat(1, k // 32)[None].contiguous()
    bias, ids = torch.zeros(1, n).bfloat16(), torch.zeros(8, 1, dtype=torch.int32)
    p = few.plan(k, 1, True, False, rows=2)
    pairs = sort_pairs(ids, 1, None, 8)
    for start in range(0, k, 8):
        x = torch.zeros(8, k).bfloat16()
        x[:, start : start + 8] = torch.eye(8)
        got = emulated_mxfp4.product(x, w, scales, bias, pairs, p, torch.ones(8), ALPHA, LIMIT, tmp_path)
        want = mxfp4.dequantize(w[0], scales[0], torch.float64)[:, start : start + 8].t()
        assert torch.equal(got.double(), want)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_rows_without_a_local_expert_stay_unwritten(tmp_path: Path) -> None:
    w, scales, bias, ids = _data(6, 2, 4, 32, 64)
    local = torch.tensor([0, -1, 1, -1], dtype=torch.int32)
    capacity = -(-padded_size(ids.numel(), 8, 4) // 8) * 8
    made = moe_align.run(ids, 8, 4, capacity, local, False)
    pairs = Sorted(made[0], made[1], made[2], ids.numel(), 2, made[1].numel())
    x = torch.ones(ids.numel(), 64).bfloat16()
    p = few.plan(64, 1, True, False, rows=1)
    one = torch.ones(ids.numel())
    got = emulated_mxfp4.product(x, w[:2], scales[:2], bias[:2], pairs, p, one, ALPHA, LIMIT, tmp_path)
    assert torch.equal(got.isnan().all(1), local[ids.flatten().long()] < 0)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("is_sorted", [True, False])
def test_mxfp4_kernels_compile_for_hopper(is_sorted: bool) -> None:
    for p in (few.plan(2880, 4, is_sorted, True), few.plan(2880, 1, is_sorted, False)):
        assert (
            cuda_rtc.nvrtc_compile(text(few.COMMON, few.SOURCE), ("--gpu-architecture=sm_90a", *p.options))[
                :4
            ]
            == b"\x7fELF"
        )
        assert p.shared * p.resident <= 228 * 1024


def test_unsupported_matrices_name_the_reason() -> None:
    w, scales, bias, _ = _data(1, 1, 2, 32, 64)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    assert few.refused(x, w, scales, bias, "w1") is None
    assert "not MXFP4" in str(few.refused(x, w, None, bias, "w1"))
    assert "float16" in str(few.refused(x.half(), w, scales, bias, "w1"))
    assert "strides" in str(few.refused(x, w.transpose(0, 1), scales, bias, "w1"))
    assert "12 rows" in str(few.refused(x, w[:1, :12], scales[:1, :12], bias[:1, :12], "w1"))
    wide = torch.empty(1, 16, 16384, dtype=torch.uint8)
    assert "shared memory" in str(few.refused(x, wide, wide[0, :, :1024].clone()[None], bias[:1, :16], "w1"))


TILES = """
import sys
import torch
from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.activation import swigluoai_and_mul as swiglu
from fastkernels.overrides.moe import fused_experts_swigluoai as of
mxfp4, alone = "mxfp4" in sys.argv, "alone" in sys.argv
dims = {"tokens": 19, "experts": 5, "topk": 2, "hidden": 96, "intermediate": 160, "mxfp4": mxfp4}
if not mxfp4:
    dims.update(hidden=72, intermediate=75)
spec = registry.get("fused_experts_swigluoai")
if not alone:
    swiglu.swigluoai_and_mul.run = None  # a call would fail
for dtype, rtol in (("float32", 1e-4), ("float16", 4e-3), ("bfloat16", 3e-2)):
    args = spec.inputs(Case("case", dims, dtype), "cpu", torch.Generator().manual_seed(0))
    more = (*args[7:10], *[None] * (10 - len(args)), 1.3, 0.7)[:5]
    double = [a.double() if a.is_floating_point() else a for a in args[:7]]
    want = of.reference(*double, *more)
    assert not torch.allclose(want, of.reference(*double, *more[:3], 1.3, 70.0))
    for tiles in ("16/64/64/1/4/2", "64/32/128/8/4/2"):
        got = of._triton(*args[:7], *more, tiles=tiles)
        assert got.dtype == args[0].dtype
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=rtol * float(want.abs().max()))
"""


@pytest.mark.parametrize(
    "more", [("mxfp4",), ("floats",), pytest.param(("mxfp4", "alone"), marks=pytest.mark.slow)]
)
def test_triton_experts_match_float64(more: tuple[str, ...]) -> None:
    """SwiGLU is in the first product, unless a provider is named for it."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    if "alone" in more:
        env["FASTKERNELS_PROVIDER"] = "swigluoai_and_mul:triton"
    done = warm.run(["-c", TILES, *more], env)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "n", "k", "glu", "form", "group", "zeros", "params"),
    [
        # several blocks of an expert, the last tile within the one before it
        (11, 2, 3, 80, 256, 2, "int4", 128, True, {"rows": 2, "parts": 2}),
        (11, 2, 3, 72, 384, 0, "int4", 384, False, {"rows": 1, "parts": 2, "tokens": 4}),
        (1, 3, 16, 48, 384, 2, "int4", 128, False, {}),  # pairs are not sorted
        (1, 3, 16, 40, 1152, 0, "int4", 128, True, {"rows": 2, "parts": 2, "ahead": 2}),
        (7, 2, 5, 80, 480, 2, "nvfp4", 32, False, {"rows": 3, "parts": 2}),
        (1, 3, 16, 40, 160, 0, "nvfp4", 32, False, {}),
    ],
)
def test_emulated_product_of_other_formats_matches_float64(
    tokens: int, topk: int, experts: int, n: int, k: int, glu: int, form: str, group: int, zeros: bool,
    params: dict[str, int], tmp_path: Path,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(tokens + n)
    w, _, _, ids = _data(tokens, topk, experts, n, k)
    x = torch.randn(tokens if glu else tokens * topk, k, generator=g).bfloat16()
    weights = torch.rand(tokens * topk, generator=g)
    pairs = sort_pairs(ids, experts, None, params.get("tokens", few.TOKENS))
    if form == "int4":
        scales = (torch.rand(experts, n, k // group, generator=g) * 0.2 * k**-0.5).to(
            torch.float16 if zeros else torch.bfloat16
        )
        more = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=g)
        matrices = [
            dequantize_int4(w[e], scales[e], more[e] if zeros else None, torch.float64)
            for e in range(experts)
        ]
    else:
        scales = torch.randint(0, 127, (experts, n, k // 16), dtype=torch.uint8, generator=g).view(FP8)
        more = (torch.rand(experts, n, generator=g) + 0.5) * 0.003 * k**-0.5
        matrices = [
            dequantize_nvfp4(w[e], scales[e], more[e].double(), torch.float64) for e in range(experts)
        ]
    p = few.plan(
        k, topk if glu else 1, pairs.pairs is not None, glu, form=("mxfp4", "int4", "nvfp4").index(form), group=group,
        zero=zeros, half_scales=form == "int4" and scales.dtype == torch.float16, **params,
    )  # fmt: skip
    got = emulated_mxfp4.product(x, w, scales, more, pairs, p, weights, 0, 0, tmp_path)
    for pair, expert in enumerate(ids.flatten().tolist()):
        want = matrices[expert] @ x[pair // p.topk].double()
        gate, up = want.chunk(2)
        want = torch.nn.functional.silu(gate) * up if glu else want * weights[pair].double()
        torch.testing.assert_close(got[pair].double(), want, rtol=0.01, atol=0.002)


@pytest.mark.parametrize(("width", "tokens"), [(2048, 8), (14336, 4), (28672, 2), (65536, 0)])
def test_blocks_of_wide_matrices_have_fewer_tokens(width: int, tokens: int) -> None:
    found = few.fitting(
        lambda tokens: [few.plan(k, 2, True, 0, form=few.INT4, tokens=tokens) for k in (4096, width)]
    )
    reason = few.too_large(*found)
    assert (
        [p.tokens for p in found] == [tokens] * 2 if tokens else f"{width} weights do not fit" in str(reason)
    )
    assert (reason is None) == (tokens > 0)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("tokens", [1, 9])  # not sorted, and sorted
def test_plans_of_experts_compile(tokens: int) -> None:
    ids, w1, w2 = (
        torch.zeros(size, dtype=torch.uint8) for size in ((tokens, 2), (16, 64, 128), (16, 256, 64))
    )
    scales = torch.zeros(16, 64, 2).half(), torch.zeros(16, 256, 1).half()
    for p in (*int4._plans(ids, w1, w2, *scales, True, None), *nvfp4._plans(ids, w1, w2, None)):
        found = cuda_rtc.nvrtc_compile(
            text(few.COMMON, few.SOURCE), ("--gpu-architecture=sm_90a", *p.options)
        )
        assert found[:4] == b"\x7fELF" and p.tokens == (1 if tokens == 1 else few.TOKENS)
