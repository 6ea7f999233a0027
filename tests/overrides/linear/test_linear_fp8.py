"""FP8 linear layers beyond the op's cases: granularities, unsupported calls, and the CUDA C++ kernel's plans."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import emulated
from support.kernels.linear_fp8 import FP8, args, randn

from fastkernels.core import cuda_rtc
from fastkernels.core import tuning as tuned
from fastkernels.overrides.kit import hopper
from fastkernels.overrides.linear import linear_fp8_libraries as flashinfer
from fastkernels.overrides.linear import linear_fp8_libraries as libraries
from fastkernels.overrides.linear.kernels import linear_fp8_scales as scales
from fastkernels.overrides.linear.kernels import wgmma_linear_cuda as wgmma16
from fastkernels.overrides.linear.kernels import wgmma_linear_fp8_cuda as wgmma
from fastkernels.overrides.linear.linear_fp8 import linear_fp8, reference
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8

ROOT = Path(__file__).parents[3]
NO_NVRTC = cuda_rtc.unavailable()
# Llama-3.1-8B's: N, K
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


# -- values


@pytest.mark.parametrize("group", [0, -1, 128])
def test_quantized_layer_is_close_to_float32(group: int) -> None:
    """With our own quantization and its layout of scales, the error stays within float8's rounding."""
    x, weight = randn(33, 384), randn(272, 384, seed=1) / 384**0.5
    q, x_scale = quantize_fp8(x, None, group, None, 1e-10, group > 0, group > 0)
    if group == 128:
        tiles = torch.nn.functional.pad(weight, (0, 0, 0, 112)).reshape(3, 128, 3, 128)
        w_scale = tiles.abs().amax(dim=(1, 3)) / 448
        w = (tiles / w_scale[:, None, :, None]).reshape(384, 384)[:272].to(FP8)
    else:
        w, w_scale = quantize_fp8(weight, None, group)
    want = x @ weight.t()
    for found in (
        linear_fp8(q, w, x_scale, w_scale, None, torch.float16),
        linear_fp8(q.view(3, 11, 384), w, x_scale.view(3, 11, -1) if group else x_scale, w_scale).flatten(
            0, 1
        ),
    ):
        error = (found.float() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()
        assert 0.01 < error < 0.05, error


def test_every_granularity_matches_float64() -> None:
    x, weight, _, _ = args(m=5, n=200, k=300)
    xs, ws = torch.rand(5, 3), torch.rand(2, 3)
    wide = [s.double().repeat_interleave(128, -1)[:, :300] for s in (xs, ws.repeat_interleave(128, 0)[:200])]
    want = (x.double() * wide[0]) @ (weight.double() * wide[1]).t()
    assert scales.granularity(x, weight, xs, ws) == scales.BLOCK
    torch.testing.assert_close(reference(x.double(), weight.double(), xs.double(), ws.double()), want)
    plain = x.double() @ weight.double().t()
    one, of_x, of_w = torch.tensor(0.5), torch.rand(5, 1), torch.rand(200)
    for x_scale, w_scale, kind in (
        (one, one, scales.TENSOR), (of_x, of_w, scales.ROW), (of_x[:, 0], of_w[:, None], scales.ROW),
        (of_x, one, scales.ROW), (one, of_w, scales.ROW),
    ):  # fmt: skip
        assert scales.granularity(x, weight, x_scale, w_scale) == kind
        found = reference(x.double(), weight.double(), x_scale.double(), w_scale.double())
        torch.testing.assert_close(
            found, plain * x_scale.double().reshape(-1, 1) * w_scale.double().reshape(1, -1)
        )


def test_mismatched_shapes_raise() -> None:
    x, weight, xs, ws = args()
    for wrong, said in (
        (
            (x, weight, torch.rand(31, 1), ws),
            r"x_scale must have one value, one per token \(32, 1\), or with weight_scale",
        ),
        ((x, weight, torch.rand(32, 2), ws), r"with scales \(32, 2\) and \(48,\)"),
        ((x, weight, xs, torch.rand(47)), r"weight_scale one value or one per row \(48,\)"),
        ((x, weight[:, :-16], xs, ws), r"x \(32, 144\) must be \[..., K\] and weight \(48, 128\) \[N, K\]"),
        ((x, weight, xs, ws, torch.zeros(47)), r"bias \(47,\) must be \[48\]"),
    ):
        with pytest.raises(ValueError, match=said):
            linear_fp8(*wrong)


def test_strides_keep_the_layout_of_scales() -> None:
    """A single scale has stride 0; block scales keep the layout of the quantization."""
    _, _, xs, ws = args(m=7, n=300, k=384, kind=scales.BLOCK)
    columns = torch.empty(3, 8).t()[:7].copy_(xs)
    assert scales.strides(scales.BLOCK, columns, ws)[1] == (1, 8, 3, 1)
    assert scales.strides(scales.ROW, torch.rand(7, 1), torch.rand(300, 1))[1] == (1, 0, 1, 0)
    assert scales.strides(scales.ROW, torch.rand(1), torch.rand(()))[1] == (0, 0, 0, 0)


# -- choice of providers


def test_provider_order_is_the_measured_one() -> None:
    """On an H200: ours up to 64 tokens, DeepGEMM for block scales, CUTLASS for the rest."""
    names = [p.name for p in linear_fp8.providers]
    ours, others = ["cuda-wgmma-fp8"], ["cuda-tiled-fp8", "triton", "cublas", "reference"]
    assert names == [*ours, "deepgemm", "flashinfer", "cutlass", "sgl_kernel", *others]


def test_shipped_table_has_the_measured_sets() -> None:
    key = linear_fp8.key
    assert key is not None
    found = tuned.lookup(key, tuned.entries("linear_fp8", "NVIDIA H200"))
    for n, k in SHAPES.values():
        for tokens in (1, 8, 32):
            entry = found.find((n, k, 1, torch.bfloat16), (tokens,))
            assert entry.provider == "cuda-wgmma-fp8" and entry.params == wgmma.choose(tokens, n, k)
            assert found.find((n, k, 128, torch.bfloat16), (tokens,)) is None  # ours, as the op's own order


@pytest.mark.parametrize("there", [True, False])
def test_block_scales_over_32_tokens_go_to_deepgemm(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(libraries, "installed", lambda name: there and name == libraries.DEEP_GEMM[1])
    libraries._has_deep_gemm.cache_clear()
    try:
        left = libraries.left_to_deepgemm(*args(33, 64, 256, scales.BLOCK))
        assert (left is not None and "33 tokens" in left) if there else left is None
        for ours in (args(32, 64, 256, scales.BLOCK), args(33, 64, 256), args(33, 60, 256, scales.BLOCK)):
            assert libraries.left_to_deepgemm(*ours) is None
    finally:
        libraries._has_deep_gemm.cache_clear()


def test_flashinfer_supports_the_hosts_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flashinfer, "_called", set())
    monkeypatch.setattr(
        flashinfer, "flashinfer_product", lambda: lambda x, w, xs, ws: reference(x, w, xs, ws)
    )
    x, weight, xs, ws = args(5, 64, 256, scales.BLOCK)
    assert "column-major" in str(flashinfer.supports_flashinfer(x, weight, xs, ws))
    xs = torch.nn.functional.pad(xs.t(), (0, 3)).t()[:5]  # as quantize_fp8 pads them
    call = x, weight, xs, ws
    assert flashinfer.supports_flashinfer(*call) is None
    assert "without a bias" in str(flashinfer.supports_flashinfer(*call, torch.zeros(64)))
    assert "fewer than 32" in str(flashinfer.supports_flashinfer(*args(32, 64, 256, scales.BLOCK)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "not compiled" in str(flashinfer.supports_flashinfer(*call))
    assert torch.equal(flashinfer.linear_fp8_flashinfer(*call), reference(*call))
    assert flashinfer.supports_flashinfer(*call) is None
    monkeypatch.setattr(flashinfer, "flashinfer_product", lambda: "there is no nvcc")
    assert flashinfer.supports_flashinfer(*call) == "there is no nvcc"
    with pytest.raises(RuntimeError, match="no nvcc"):
        flashinfer.linear_fp8_flashinfer(*call)


# -- the CUDA C++ kernel


@settings(max_examples=300, deadline=None)
@given(
    m=st.integers(1, 64), n=st.integers(1, 100_000), k=st.integers(8, 2000).map(lambda i: 16 * i),
    params=st.sampled_from(wgmma.PARAMS), blocks=st.booleans(), sms=st.sampled_from([7, 114, 132]),
)  # fmt: skip
def test_plan_fits_shared_memory(
    m: int, n: int, k: int, params: dict[str, int], blocks: bool, sms: int
) -> None:
    p = wgmma.plan(m, n, k, **params, blocks=blocks, sms=sms)
    chunks = p.block_k // 64
    assert p.rows % 8 == 0 and 8 <= p.rows <= 128 and chunks in (2, 4) and p.tokens >= m
    static = 3 * 8 * p.stages + 16
    static += 4 * p.stages * chunks * (p.tokens + 2) if blocks else 4 * (p.tokens + p.rows)
    assert p.shared + static <= 227 * 1024 and 3 <= p.stages <= wgmma16.MAX_STAGES
    assert 1 <= p.ahead <= p.stages
    assert p.stages * 2 * p.block_k * p.rows + 128 * p.tokens >= 8192  # 64 rows of x are read
    # No split is empty
    assert p.splits <= -(-(k // 2) // p.block_k) and p.items == -(-n // p.rows) * p.splits
    assert wgmma.choose(m, n, k, blocks) in [q for q in wgmma.PARAMS if wgmma.fits(q, m, k)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_default_is_balanced(name: str, m: int) -> None:
    """No SM reads over 3.2% more of the weight than the mean."""
    n, k = SHAPES[name]
    p = wgmma.plan(m, n, k, **wgmma.choose(m, n, k))
    assert -(-p.items // p.grid) * p.rows <= 1.032 * n / 132


def test_prefetch_before_x_is_bounded() -> None:
    """An SM needs 34 KB outstanding (1 us at 34 KB/us); `ahead` prefetches about twice that, and no more."""
    (new,) = [p for p in wgmma.PARAMS if "ahead" in p]
    old = {"splits": 1, "stages": 4, "rows": 128}
    for n, k in SHAPES.values():
        p, whole = (wgmma.plan(8, n, k, **params) for params in (new, old))
        stage, most = 2 * p.block_k * p.rows, 1024 * new["ahead"]
        assert (p.ahead - 1) * stage < most <= p.ahead * stage and p.stages * stage > 1.5 * most
        assert whole.ahead == whole.stages and p == whole._replace(ahead=p.ahead)
        assert wgmma.choose(8, n, k) == new


def test_float8_instruction_has_no_transposes() -> None:
    text = wgmma16.multiply(112, "e4m3")
    assert "m64n112k32.f32.e4m3.e4m3" in text and text.count('"+f"(c[') == 56
    assert "p, 1, 1;" in text  # float8 has no transposed operands


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("params", wgmma.PARAMS, ids=str)
def test_every_set_compiles(params: dict[str, int]) -> None:
    for m, n, bf16, blocks in ((16, 4096, True, False), (64, 28672, False, True)):
        p = wgmma.plan(m, n, 14336, **params, blocks=blocks)
        told = ("--gpu-architecture=sm_90a", *wgmma.options(p, bf16, blocks))
        assert cuda_rtc.cubin(wgmma.source(p), told)[:4] == b"\x7fELF"


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = wgmma.supports_wgmma_fp8(*args())
    assert reason is not None and (reason == NO_NVRTC or "Hopper" in reason)
    # The other reasons, on a simulated Hopper GPU
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    x, w, xs, ws = args()
    for right in (args(), args(kind=scales.BLOCK), args(kind=scales.TENSOR), args(m=64), args(m=0)):
        assert wgmma.supports_wgmma_fp8(*right) is None
    assert wgmma.supports_wgmma_fp8(x.view(4, 8, 144), w, xs.view(4, 8, 1), ws) is None
    wide = randn(32, 160).to(FP8)
    for said, case in (
        ("more than 64 tokens", args(m=65)),
        ("K = 136 is under 128 or no multiple of 16", args(k=136)),
        ("K = 112 is under 128", args(k=112)),
        ("x is torch.bfloat16", [x.bfloat16(), w, xs, ws]),
        (r"x has strides (160, 1): its rows", [wide[:, 8:152], w, xs, ws]),
        (r"weight has strides (0, 1)", [x, w[:1].expand(48, 144), xs, ws]),
        ("bias is torch.float32, the result torch.bfloat16", [x, w, xs, ws, torch.randn(48)]),
    ):
        assert said in str(wgmma.supports_wgmma_fp8(*case))
    monkeypatch.setattr(hopper, "_capability", lambda device: (10, 0))
    assert "this GPU has 10.0" in str(wgmma.supports_wgmma_fp8(x, w, xs, ws))


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "set_", "sms"),
    [
        (
            scales.BLOCK,
            33,
            264,
            1152,
            0,
            2,
        ),  # two tiles per block, a reused ring, tiles across blocks of rows
        (scales.BLOCK, 64, 300, 2048, 5, 4),  # four splits: which block adds which part
        (scales.ROW, 8, 300, 2064, 3, 3),  # two splits, K that ends in the middle of a stage
        pytest.param(scales.TENSOR, 17, 33, 288, 0, 2, marks=pytest.mark.slow),
        # few stages of the weight before x
        pytest.param(scales.ROW, 8, 300, 4112, 7, 3, marks=pytest.mark.slow),
        pytest.param(scales.BLOCK, 8, 300, 4112, 7, 3, marks=pytest.mark.slow),
    ],
)
def test_emulated_kernel_matches_float64(
    kind: int, m: int, n: int, k: int, set_: int, sms: int, tmp_path: Path
) -> None:
    """Runs the CUDA text with CPU threads and emulated PTX: indices, scales, barriers, tickets."""
    x, weight, x_scale, w_scale = args(m, n, k, kind)
    if kind == scales.BLOCK:
        x_scale = torch.empty(scales.blocks(k), -(-m // 4) * 4).fill_(float("nan")).t()[:m].copy_(x_scale)
    call = [x, weight, x_scale, w_scale / k**0.5, randn(n, seed=2).bfloat16()]
    got = emulated.linear_fp8(call, kind, wgmma.PARAMS[set_], sms, tmp_path)
    want = reference(*(t.double() for t in call))
    torch.testing.assert_close(got.double(), want, rtol=8e-3, atol=1e-4)


@pytest.mark.slow
def test_experiment_runs_on_the_cpu(tmp_path: Path) -> None:
    told = ("--device", "cpu", "--quick", "--tokens", "8", "--scales", "row,block")
    script, rows_file = ROOT / "bench/experiments/linear/linear_fp8.py", tmp_path / "rows.jsonl"
    command = [sys.executable, str(script), *told, "--out", str(rows_file)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert {r["status"] for r in rows} == {"ok", "unsupported"}
    steps = {(r["case"]["scales"], r["subject"]["provider"]) for r in rows if r["case"]["kind"] == "step"}
    assert steps == {(s, p) for s in ("row", "block") for p in ("production", "reference", "triton")}


@pytest.mark.gpu
@pytest.mark.parametrize("params", wgmma.PARAMS, ids=str)
@pytest.mark.parametrize("kind", [scales.TENSOR, scales.ROW, scales.BLOCK])
def test_gpu_result_matches_reference(params: dict[str, int], kind: int) -> None:
    n, k = 1001, 2064
    given = [t.cuda() for t in args(64, n, k, kind)]
    bias = torch.randn(n, device="cuda").bfloat16()
    if (reason := wgmma.supports_wgmma_fp8(*given, bias)) is not None:
        pytest.skip(reason)
    given[3] *= 1 / k**0.5
    for m in (1, 8, 9, 17, 33, 64):
        x, weight, xs, ws = given
        call = (x[:m], weight, xs if kind == scales.TENSOR else xs[:m], ws, bias)
        got = wgmma.linear_fp8_wgmma(*call, **params)
        assert torch.equal(got, wgmma.linear_fp8_wgmma(*call, **params))
        want = reference(*(t.double() for t in call))
        torch.testing.assert_close(got.double(), want, rtol=1.6e-2, atol=1.6e-2)
