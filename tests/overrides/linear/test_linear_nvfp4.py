"""linear_nvfp4: the emulated CUDA C++ kernel and dequantization against float64, layouts, unsupported calls."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.kernels import emulated_int4

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear import linear_nvfp4 as op
from fastkernels.overrides.linear.kernels import int4_linear_cuda as few

# all values of e4m3 that are not negative, without NaN
SCALES = torch.arange(127, dtype=torch.uint8).view(FP8)


def layer(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensors of a checkpoint: packed weights, scales, factors."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    scale = SCALES[torch.randint(0, 127, (n, k // 16), generator=g)]
    return packed, scale, (torch.rand(n, generator=g) + 0.5) * 0.01 * k**-0.5


def test_layout_of_the_op_has_the_values_of_the_checkpoint() -> None:
    packed, scale, factor = layer(33, 160)
    bits = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    value = torch.where(exponent > 0, (1 + mantissa / 2) * 2.0 ** (exponent.double() - 1), mantissa / 2)
    want = value * (1 - 2.0 * sign) * scale.double().repeat_interleave(16, 1) * factor.double()[:, None]
    found = op.dequantized(*op.from_checkpoint(packed, scale), factor.double())
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    torch.testing.assert_close(op.dequantize_nvfp4(packed, scale, factor, torch.float32).double(), want)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("m", "n", "k", "params"),
    [
        (5, 80, 640, {"warps": 2, "parts": 1, "splits": 2, "ahead": 3}),
        # tiles of 32 rows, the last of which has 16, more parts than steps, splits of different lengths
        (19, 112, 640, {"warps": 8, "parts": 4, "splits": 3, "height": 2, "ahead": 2}),
        # warps that begin within tiles
        (3, 208, 640, {"warps": 4, "stream": 1, "ahead": 3}),
        (13, 48, 384, {"warps": 4, "stream": 1, "ahead": 2, "height": 2}),
    ],
)
def test_emulated_product_matches_float64(
    m: int, n: int, k: int, params: dict[str, int], tmp_path: Path
) -> None:
    g = torch.Generator().manual_seed(m)
    packed, scale, factor = layer(n, k, m)
    weight, weight_scale = op.from_checkpoint(packed, scale)
    x, bias = torch.randn(m, k, generator=g).bfloat16(), torch.randn(n, generator=g).bfloat16()
    p = few.plan(m, n, k, 32, False, True, sms=3, fp4=True, **params)
    got = emulated_int4.product(x, weight, weight_scale, factor, bias, p, tmp_path)
    want = op.reference(x.double(), weight, weight_scale, factor.double(), bias.double())
    # weights are exact: only the result is rounded
    torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=1e-4)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("m", "stream"), [(1, 0), (32, 0), (64, 0), (16, 1)])
def test_kernels_compile_for_hopper(m: int, stream: int) -> None:
    p = few.plan(m, 4096, 4096, 32, stream=stream, fp4=True)
    assert (
        cuda_rtc.nvrtc_compile(text(few.SOURCE), (*p.options, "--gpu-architecture=sm_90a"))[:4] == b"\x7fELF"
    )


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "no_hopper", lambda source, device: None)
    packed, scale, factor = layer(16, 256)
    weight, weight_scale = op.from_checkpoint(packed, scale)
    x, supports = torch.ones(4, 256).bfloat16(), op.linear_nvfp4.providers[0].supports
    assert supports is not None and supports(x, weight, weight_scale, factor) is None
    refused = {
        "x is torch.float16": (x.half(), weight, weight_scale, factor),
        "weight_factor torch.float64": (x, weight, weight_scale, factor.double()),
        "N = 15": (x, weight[:15], weight_scale[:15], factor[:15]),
        "K = 96": (x[:, :96].contiguous(), *op.from_checkpoint(packed[:, :48], scale[:, :6]), factor),
    }
    for reason, call in refused.items():
        assert reason in str(supports(*call))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_scale", torch.ones(16, 8).to(FP8)),
        ("weight_scale", torch.ones(16, 16, dtype=torch.uint8)),
        ("weight_factor", torch.ones(15)),
        ("weight", torch.zeros(16, 128)),
    ],
)
def test_wrong_shapes_and_dtypes_are_named(name: str, value: torch.Tensor) -> None:
    packed, scale, factor = layer(16, 256)
    weight, weight_scale = op.from_checkpoint(packed, scale)
    args = {"x": torch.ones(2, 256), "weight": weight, "weight_scale": weight_scale, "weight_factor": factor}
    with pytest.raises(ValueError, match=name):
        op.linear_nvfp4(*{**args, name: value}.values())
