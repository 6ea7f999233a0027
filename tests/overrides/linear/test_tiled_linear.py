"""The tiled kernel for many tokens: emulated against float64, its plans, its machine code, unsupported calls."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import emulated_tiled
from support.kernels.linear_fp8 import args as fp8_args

from fastkernels.core import cuda_rtc
from fastkernels.overrides.block import linear_residual as residuals
from fastkernels.overrides.kit import hopper
from fastkernels.overrides.linear.kernels import tiled_linear_cuda as tiled
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK
from fastkernels.overrides.linear.linear_fp8 import reference as fp8_reference
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.rope.rope_nd import reference as rope_reference
from fastkernels.overrides.routing.sorted_pairs import Sorted

NO_NVRTC = cuda_rtc.unavailable()
SQUARE = {"rows": 128, "columns": 128, "cooperate": True}
WIDE = {**SQUARE, "columns": 256}


def expected(
    f: int, x: Any, weight: Any, bias: Any = None, scale: Any = None, residual: Any = None
) -> torch.Tensor:
    y = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if f in (tiled.GELU, tiled.GELU_TANH):
        return F.gelu(y, approximate="none" if f == tiled.GELU else "tanh")
    return y if f == tiled.NONE else residual.double() + (1 if scale is None else scale.double()) * y


def arguments(m: int, n: int, k: int, f: int, dtype: torch.dtype, scaled: bool = True) -> list[Any]:
    g = torch.Generator().manual_seed(m + f)
    x, weight = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g) * 2 / k**0.5
    bias, scale, residual = (torch.randn(*s, generator=g).to(dtype) for s in ((n,), (n,), (m, n)))
    more = [scale if scaled else None, residual] if f == tiled.RESIDUAL else [None, None]
    return [x.to(dtype), weight.to(dtype), bias if scaled else None, *more]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("m", "n", "k", "f", "stages", "sms", "params"),
    [
        # Two warpgroups in turn: more tiles than blocks, laps of the ring that end within a tile
        (150, 96, 200, tiled.RESIDUAL, 3, 2, {"rows": 64, "columns": 64}),
        # Clusters that share W, of which the last has a tile without rows; a ring as long as a tile
        (150, 160, 136, tiled.GELU, 3, 4, {"rows": 64, "columns": 64, "cluster": 2}),
        # Clusters of four that share both: tiles without rows and without columns
        pytest.param(300, 160, 136, tiled.NONE, 3, 4, {"rows": 64, "columns": 64, "shares": "wx", "cluster": 4},
                     marks=pytest.mark.slow),
        pytest.param(150, 96, 200, tiled.NONE, 2, 2, {"rows": 128, "columns": 64, "shares": "x", "cluster": 2},
                     marks=pytest.mark.slow),
        pytest.param(300, 160, 200, tiled.RESIDUAL, 2, 2, {"rows": 256, "columns": 64, "cooperate": True},
                     marks=pytest.mark.slow),
        pytest.param(130, 160, 72, tiled.GELU_TANH, 2, 4, {"rows": 128, "columns": 64, "cooperate": True, "cluster": 2},
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_emulated_kernel_matches_float64(
    m: int, n: int, k: int, f: int, stages: int, sms: int, params: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:  # fmt: skip
    """Runs the CUDA text with CPU lanes and emulated PTX: tiles, the ring, its barriers, turns, swizzle, rows of W."""
    args = arguments(m, n, k, f, dtype, scaled=stages == 3)
    got = emulated_tiled.linear_tiled(args, f, params, sms, stages, tmp_path)
    want = expected(f, *args)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    error = (got.double() - want).abs() / (rounding * want.abs() + 1e-5)
    assert float(error.max()) <= 1 and float((got == want.to(dtype)).float().mean()) > 0.99


def of_several(m: int, n: int, k: int, f: int, parts: int) -> tuple[list[Any], torch.Tensor]:
    """(x, weights, biases of which the last is absent, scale, residual) and the exact results."""
    several = [arguments(m, n, k, tiled.GELU_TANH + i, torch.bfloat16) for i in range(parts)]
    x, weights = several[0][0], [a[1] for a in several]
    biases = [*(a[2] for a in several[:-1]), None]
    each = torch.stack([expected(tiled.NONE, x, w, b) for w, b in zip(weights, biases, strict=True)])
    act = F.silu if f == tiled.SWIGLU else F.gelu
    return [x, *weights, *biases, None, None], act(each[0]) * each[1] if f in tiled.GATED else each


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("parts", "n", "f", "params"),
    [
        (2, 96, tiled.SWIGLU, {"rows": 64, "columns": 64}),
        (2, 96, tiled.GEGLU, {"rows": 64, "columns": 64}),
        (3, 96, tiled.NONE, {"rows": 128, "columns": 64, "cooperate": True}),  # tiles that end past a weight
        pytest.param(2, 96, tiled.SWIGLU, {"rows": 64, "columns": 128, "cluster": 2}, marks=pytest.mark.slow),
        pytest.param(2, 96, tiled.SWIGLU, {"rows": 64, "columns": 64, "shares": "wx", "cluster": 4},
                     marks=pytest.mark.slow),
        pytest.param(2, 96, tiled.SWIGLU, {"rows": 128, "columns": 64, "shares": "x", "cluster": 2},
                     marks=pytest.mark.slow),
        pytest.param(3, 64, tiled.NONE, {"rows": 128, "columns": 64, "shares": "x", "cluster": 2},
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_emulated_kernel_of_several_weights_matches_float64(
    parts: int, n: int, f: int, params: dict[str, Any], tmp_path: Path
) -> None:
    args, want = of_several(150, n, 136, f, parts)
    got = emulated_tiled.linear_tiled(args, f, params, 4, 3, tmp_path, parts)
    assert float(((got.double() - want).abs() / (2.0**-8 * want.abs() + 1e-5)).max()) <= 1


def blocks(m: int, n: int, k: int, by_column: bool, device: str = "cpu") -> tuple[list[Any], torch.Tensor]:
    """Arguments of linear_fp8 with block scales, x's in one of two layouts, and the exact result."""
    args = [*fp8_args(m, n, k, BLOCK), torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16()]
    if by_column:
        args[2] = args[2].t().contiguous().t()
    args = [t.to(device) for t in args]
    return args, fp8_reference(*(t.double() for t in args))


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("m", "n", "k", "params"),
    [
        (300, 160, 400, {**SQUARE, "rows": 256}),  # tiles and blocks of scales that end past the matrices
        (150, 288, 144, {**SQUARE, "shares": "x", "cluster": 2}),
        pytest.param(150, 160, 272, {**SQUARE, "columns": 64, "cluster": 2}, marks=pytest.mark.slow),
        pytest.param(150, 352, 272, WIDE, marks=pytest.mark.slow),
        (70, 160, 1056, {**SQUARE, "columns": 64, "splits": 2}),  # four and five pieces of 128 columns
        pytest.param(150, 160, 1408, {**SQUARE, "splits": 2}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_emulated_kernel_of_float8_blocks_matches_float64(
    m: int, n: int, k: int, params: dict[str, Any], tmp_path: Path
) -> None:
    args, want = blocks(m, n, k, m == 300)
    x, weight, x_scale, weight_scale, bias = args
    got = emulated_tiled.linear_tiled(
        [x, weight, bias], tiled.NONE, params, 2, 2, tmp_path, scales=(x_scale, weight_scale)
    )
    assert float(((got.double() - want).abs() / (2.0**-8 * want.abs() + 1e-3)).max()) <= 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("f", "n", "params"),
    [
        (tiled.NONE, 160, {**SQUARE, "shares": "x", "cluster": 2}),
        (tiled.SWIGLU_FP8, 512, WIDE),
        pytest.param(tiled.NONE, 160, WIDE, marks=pytest.mark.slow),
    ],
)
def test_emulated_kernel_of_experts_matches_float64(
    f: int, n: int, params: dict[str, Any], tmp_path: Path
) -> None:
    """Five blocks of rows, of which one has no local expert, and the last ones are not in use."""
    args, _ = blocks(640, n, 272, True)
    x, weight, x_scale, weight_scale, _ = args
    weights = torch.stack([weight, weight.flip(0), weight.roll(7, 0)])
    scales = torch.stack([weight_scale, weight_scale.flip(0), weight_scale * 2])
    g = torch.Generator().manual_seed(0)
    used, count, factors = 512, 450, torch.rand(450, generator=g)
    places = torch.cat((torch.randperm(count, generator=g), torch.full((640 - count,), count))).int()
    places[:used] = places[:used][torch.randperm(used, generator=g)]
    experts = torch.tensor([2, 3, 0, 1, 77], dtype=torch.int32)
    sort = Sorted(places, experts, torch.tensor([used], dtype=torch.int32), count, 1, 5)
    parts = 2 if f else 1
    got = emulated_tiled.linear_tiled(
        [x, weights], f, params, 2, 2, tmp_path, parts, scales=(x_scale, scales), groups=(sort, factors)
    )
    for block in (0, 2, 3):
        rows = slice(128 * block, 128 * block + 128)
        to, e = places[rows].long(), int(experts[block])
        want = fp8_reference(*(t.double() for t in (x[rows], weights[e], x_scale[rows], scales[e])))
        if f:
            want = F.silu(want[:, : n // 2]) * want[:, n // 2 :]
            step = want.abs().unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, 1) / 448
            error = (got[rows].double() - want).abs() / (0.08 * want.abs() + 2.0**-8 * step)
        else:
            want = want[to < count] * factors[to[to < count], None]
            error = (got[to[to < count]].double() - want).abs() / (2.0**-8 * want.abs() + 1e-3)
        assert float(error.max()) <= 1


TOKENS, PREFIX = 50, 3


def rotated(args: list[Any], heads: int, halves: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of cosines and sines, exact results) of queries, keys and values of one or three weights."""
    x, parts = args[0].view(-1, TOKENS, args[0].shape[-1]), (len(args) - 3) // 2
    g = torch.Generator().manual_seed(heads)
    table = torch.randn(TOKENS - PREFIX, 2 * tiled.HEAD, generator=g).to(x.dtype)
    several = zip(args[1 : 1 + parts], args[1 + parts : 1 + 2 * parts], strict=True)
    every = torch.cat([expected(tiled.NONE, x, w, b) for w, b in several], -1).unflatten(-1, (3 * heads, -1))
    cos, sin = table[:, : tiled.HEAD], table[:, tiled.HEAD :]
    turned = rope_reference(every[:, :, : 2 * heads], cos, sin, halves)
    want = torch.cat((turned, every[:, :, 2 * heads :]), 2).flatten(2)
    return table, want.unflatten(-1, (parts, -1)).movedim(-2, 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("parts", "halves", "params"),
    [
        (1, True, {"rows": 64, "columns": 128}),  # of a tile's two heads, one is rotated
        (3, False, {"rows": 128, "columns": 64, "cooperate": True}),
        pytest.param(
            3, True, {"rows": 64, "columns": 64, "shares": "x", "cluster": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_emulated_rotation_matches_float64(
    parts: int, halves: bool, params: dict[str, Any], tmp_path: Path
) -> None:
    f = tiled.ROTATED_HALVES if halves else tiled.ROTATED_NEIGHBORS
    heads = 1
    args, _ = of_several(3 * TOKENS, 3 * heads * tiled.HEAD // parts, 72, tiled.NONE, parts)
    table, want = rotated(args, heads, halves)
    turns = (TOKENS, PREFIX, 2 * heads * tiled.HEAD)
    got = emulated_tiled.linear_tiled([*args, table], f, params, 2, 3, tmp_path, parts, turns)
    want = want.flatten(1, 2).squeeze(0) if parts == 1 else want.flatten(1, 2)
    assert float(((got.double() - want).abs() / (2.0**-8 * want.abs() + 1e-5)).max()) <= 1


@settings(max_examples=200, deadline=None)
@given(
    m=st.integers(1, 9000), n=st.integers(1, 300).map(lambda i: 32 * i), k=st.integers(8, 900).map(lambda i: 8 * i),
    params=st.sampled_from(tiled.PARAMS), sms=st.sampled_from([7, 78, 114, 132]), parts=st.integers(1, 3),
)  # fmt: skip
def test_plan_covers_the_result_and_fits(
    m: int, n: int, k: int, params: dict[str, Any], sms: int, parts: int
) -> None:
    p = tiled.plan(m, n, **params, sms=sms, parts=parts)
    down, right = -(-m // p.rows), parts * -(-n // p.columns)
    along = down if p.shares == "w" else right
    assert p.tiles * p.cluster == down * right // along * -(-along // p.cluster) * p.cluster
    assert 0 < p.grid <= sms and p.grid % p.cluster == 0
    assert 2 <= p.stages <= tiled.MAX_STAGES and p.shared <= 227 * 1024
    x_rows, w_rows = p.boxes
    assert x_rows % 8 == 0 and w_rows % 32 == 0 and max(x_rows, w_rows) <= 256
    for f in (tiled.GELU, tiled.RESIDUAL, tiled.SWIGLU, tiled.GEGLU):
        chosen = tiled.choose(m, n, k, f, sms, parts)
        assert chosen in tiled.PARAMS and tiled.fits(chosen, f)


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("f", "parts"),
    [
        *((f, 1) for f in (tiled.NONE, tiled.GELU, tiled.GELU_TANH, tiled.RESIDUAL)),
        (tiled.NONE, 3),
        (tiled.SWIGLU, 2),
        (tiled.GEGLU, 2),
        (tiled.ROTATED_HALVES, 1),
        (tiled.ROTATED_NEIGHBORS, 3),
    ],
)
def test_every_set_compiles(f: int, parts: int) -> None:
    for params in (p for p in tiled.PARAMS if tiled.fits(p, f)):
        p = tiled.plan(2048, 4096, **params, f=f, parts=parts)
        told = ("--gpu-architecture=sm_90a", *p.options(f % 2 == 1))
        assert cuda_rtc.cubin(tiled.source(p, f % 2 == 1), told)[:4] == b"\x7fELF"


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("f", "grouped"), [(tiled.NONE, False), (tiled.NONE, True), (tiled.SWIGLU_FP8, True)]
)
def test_every_float8_set_compiles(f: int, grouped: bool) -> None:
    for params in (p for p in tiled.FP8_PARAMS if f == tiled.NONE or p["columns"] == 256):
        if grouped and params["splits"] > 1:
            continue
        p = tiled.plan(2048, 4096, **params, f=f, parts=2 if f else 1, fp8=True)._replace(grouped=grouped)
        told, said = ("--gpu-architecture=sm_90a", *p.options(grouped)), list[str]()
        assert cuda_rtc.nvrtc_compile(tiled.source(p, grouped), told, hear=said.append)[:4] == b"\x7fELF"
        assert "Performance Loss" not in "".join(said)  # of products that are waited for one by one


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, scale, residual = arguments(150, 96, 136, tiled.RESIDUAL, torch.bfloat16)
    reason = tiled.supports_tiled(x, weight)
    assert reason is not None and (reason == NO_NVRTC or "Hopper" in reason)
    # The other reasons, on a simulated Hopper GPU
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    assert tiled.supports_tiled(x, weight, bias) is None
    assert tiled.supports_tiled(x.view(3, 50, 136), weight) is None
    refused = {
        "N = 72 is not": (x, weight[:72]),
        "K = 56 under 64": (x[:, :56].contiguous(), weight[:, :56].contiguous()),
        "dtype torch.float32": (x.float(), weight.float()),
        "its rows must not overlap": (x, weight[:1].expand(96, -1)),
        "rows must start at 16 bytes": (torch.randn(150, 140).bfloat16()[:, :136], weight),
        "bias is torch.float32": (x, weight, bias.float()),
    }
    for text, args in refused.items():
        assert text in str(tiled.supports_tiled(*args)), text
    supports = residuals.supports
    assert supports(residual, x, weight, bias, scale) is None
    assert "fewer than" in str(supports(residual[:9], x[:9], weight, bias, scale))
    assert "is torch.float32" in str(supports(residual.float(), x, weight, bias, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("f", [tiled.NONE, tiled.GELU, tiled.GELU_TANH, tiled.RESIDUAL])
def test_every_set_matches_float64(f: int, dtype: torch.dtype) -> None:
    for params in (p for p in tiled.PARAMS if tiled.fits(p, f)):
        for m, n, k in ((333, 992, 328), (2088, 1024, 1024)):
            x, weight, bias, scale, residual = (
                t if t is None else t.cuda() for t in arguments(m, n, k, f, dtype)
            )
            got = tiled.linear_tiled(x, weight, bias, f, scale, residual, **params)
            want = expected(f, x, weight, bias, scale, residual)
            rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
            assert bool(((got.double() - want).abs() <= rounding * want.abs() + 4e-5).all()), (params, m)


@pytest.mark.gpu
def test_every_float8_set_matches_float64() -> None:
    for params in tiled.FP8_PARAMS:
        for m, n, k in ((65, 96, 144), (333, 2112, 400), (1000, 1056, 7168)):
            args, want = blocks(m, n, k, m == 333, "cuda")
            error = (tiled.linear_fp8_tiled(*args, **params).double() - want).abs()
            assert bool((error <= 1.6e-2 * (k**0.5 + want.abs())).all()), (params, m)


@pytest.mark.gpu
@pytest.mark.parametrize(("f", "parts"), [(tiled.NONE, 3), (tiled.SWIGLU, 2), (tiled.GEGLU, 2)])
def test_every_set_of_several_weights_matches_float64(f: int, parts: int) -> None:
    for params in (p for p in tiled.PARAMS if tiled.fits(p, f)):
        for m, n, k in ((333, 992, 328), (2056, 768, 768)):
            args, want = of_several(m, n, k, f, parts)
            x, *more = (t if t is None else t.cuda() for t in args)
            got = tiled.linears_tiled(x, more[:parts], more[parts : 2 * parts], f, **params)
            assert bool(((got.double().cpu() - want).abs() <= 2.0**-8 * want.abs() + 4e-5).all()), (params, m)


@pytest.mark.gpu
@pytest.mark.parametrize(("halves", "parts"), [(True, 1), (False, 3)])
def test_every_set_that_rotates_matches_float64(halves: bool, parts: int) -> None:
    f = tiled.ROTATED_HALVES if halves else tiled.ROTATED_NEIGHBORS
    for params in (p for p in tiled.PARAMS if tiled.fits(p, f)):
        for images, heads, k in ((7, 5, 328), (42, 12, 768)):
            args, _ = of_several(images * TOKENS, 3 * heads * tiled.HEAD // parts, k, tiled.NONE, parts)
            table, want = rotated(args, heads, halves)
            x, *more = (t if t is None else t.cuda() for t in args)
            cos, sin = table.cuda().split(tiled.HEAD, 1)
            several = more[:parts], more[parts : 2 * parts]
            got = tiled.linears_tiled(x.view(images, TOKENS, k), *several, f, cos, sin, **params)
            assert bool(((got.double().cpu() - want).abs() <= 2.0**-8 * want.abs() + 1e-4).all()), (
                params,
                images,
            )


def test_few_float8_rows_have_narrow_tiles() -> None:
    """They split K where blocks would be idle, whose clusters must fit at once."""
    assert tiled.choose_fp8(128, 2112, 7168) == {**SQUARE, "columns": 64, "splits": 2}
    assert tiled.choose_fp8(256, 36864, 7168)["splits"] == 1
    assert tiled.choose_fp8(8192, 7168, 16384) == {**WIDE, "splits": 1}


def test_unsupported_float8_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, weight, x_scale, weight_scale, bias), _ = blocks(150, 96, 272, False)
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    supports = tiled.supports_tiled_fp8
    assert supports(x, weight, x_scale, weight_scale, bias) is None
    assert supports(x.view(3, 50, 272), weight, x_scale.view(3, 50, -1), weight_scale) is None
    refused = {
        "needs block scales": (x, weight, x_scale[:, :1], weight_scale[0, :1]),
        "N = 72 is not": (x, weight[:72], x_scale, weight_scale),
        "64 tokens are up to": (x[:64], weight, x_scale[:64], weight_scale),
        "bias is torch.float32": (x, weight, x_scale, weight_scale, bias.float()),
        "weight has strides": (x, weight[:1].expand(96, -1), x_scale, weight_scale),
        "it must be contiguous": (x[::2], weight, x_scale[::2], weight_scale),
    }
    for text, args in refused.items():
        assert text in str(supports(*args)), text


def test_bad_sizes_of_linear_residual_are_named() -> None:
    x, weight, bias, scale, residual = arguments(5, 32, 64, tiled.RESIDUAL, torch.float32)
    for text, args in {
        "is not .N, 64.": (residual, x, weight[:, :8]),
        "residual .4, 32. is not": (residual[:4], x, weight),
        "scale .31,. is not .32.": (residual, x, weight, bias, scale[:31]),
    }.items():
        with pytest.raises(ValueError, match=text):
            residuals.linear_residual(*args)


@pytest.mark.parametrize("name", ["linear_residual", "linear_gelu"])
def test_results_have_the_strides_that_a_compiler_expects(name: str) -> None:
    """SigLIP's first residual is a convolution's result, whose channels come first."""
    x, weight, bias, scale, residual = arguments(18, 32, 64, tiled.RESIDUAL, torch.float32)
    x, residual = (t.view(2, 9, -1).transpose(1, 2).contiguous().transpose(1, 2) for t in (x, residual))
    op = residuals.linear_residual if name == "linear_residual" else linear_gelu
    args = (residual, x, weight, bias, scale) if name == "linear_residual" else (x, weight, bias)
    expected = op.overload(*(t.to("meta") for t in args))
    for provider in (p for p in op.providers if p.unavailable("cpu") is None):
        got = provider.fn(*args)
        assert got.stride() == expected.stride() and not residual.is_contiguous(), provider.name


def test_long_sums_of_few_tokens_are_not_tiled() -> None:
    """cuBLASLt adds a residual to them, and a compiler a scaled one."""
    linear, scale = torch.nn.Linear(4096, 64).bfloat16(), torch.ones(64).bfloat16()
    few, many = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (2088, 8352))
    assert not residuals.adds(linear, few, scale) and residuals.adds(linear, many, scale)
    assert residuals.adds(linear, few, None)
    assert residuals.adds(torch.nn.Linear(3072, 64).bfloat16(), few, scale)
    x = torch.zeros(2088, 4096, dtype=torch.bfloat16)
    assert "few tokens" in str(residuals.supports(few, x, linear.weight))
    assert residuals.linear_residual.providers[1].supports(few, x, linear.weight, None, scale) is not None
