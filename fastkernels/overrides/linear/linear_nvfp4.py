"""Linear layer with NVFP4 weights, y = f x (s q)^T + b: q in e2m1, a scale in e4m3 for 16 columns, a factor for a row.

NVFP4 is NVIDIA's format of 4-bit floats (arXiv 2509.25149). Only weights are in it here: x is not quantized. Weights
are packed and in tiles as those of linear_int4. Scales are in tiles of 16 rows and 2 columns: a kernel reads those of a
unit of 32 weights at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.linear.kernels import int4_linear_cuda
from fastkernels.overrides.linear.linear_int4 import (
    STEP,
    UNIT,
    pack_int4,
    packed_values,
    tiled,
    unpack_int4,
    untiled,
)
from fastkernels.overrides.linear.linear_ternary import output, units_key

GROUP = 16  # columns that share a scale
MOST_TOKENS = 192  # of the CUDA C++ kernel, in parts of 64; more repay dequantized weights
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of 3 bits; the fourth is the sign


def from_checkpoint(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and weight_scale of this op. packed: [N, K / 2], even columns in the low half of a byte.

    scale  [N, K / 16]
    """
    return tiled(pack_int4(_nibbles(packed)), STEP), tiled(scale.view(torch.uint8), 2).view(FP8)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _values(q: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], device=q.device, dtype=factor.dtype)
    wide = scale.to(factor.dtype) * factor[:, None]
    return (values[q.int()].unflatten(-1, (-1, GROUP)) * wide.unsqueeze(-1)).flatten(-2)


def dequantize_nvfp4(
    packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight [N, K] of a checkpoint's tensors, see `from_checkpoint`, and factor [N]."""
    return _values(_nibbles(packed), scale, factor).to(dtype)


def dequantized(weight: torch.Tensor, weight_scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the op's weight [N, K] in the dtype of the factors."""
    bits = weight_scale.view(torch.uint8) if weight_scale.dtype == FP8 else weight_scale
    return _values(unpack_int4(untiled(weight, STEP)), untiled(bits, 2).view(weight_scale.dtype), factor)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_factor: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [..., K]; weight: uint8 [N, K / 2], see pack_int4 and tiled. Returns [..., N] in x's dtype.

    weight_scale   float8 e4m3 [N, K / 16] in tiles of 2 columns, not negative
    weight_factor  [N]
    bias           [N]
    Raises ValueError for other shapes.
    """
    check(x, weight, weight_scale, weight_factor, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc) @ dequantized(weight, weight_scale, weight_factor.to(acc)).t()
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(x.dtype)


def check(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_factor: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for tensors whose shapes do not match."""
    n, k = weight.shape[0], 2 * weight.shape[-1]
    if weight.dtype != torch.uint8 or weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != k or k % UNIT:
        raise ValueError(
            f"linear_nvfp4: x {tuple(x.shape)} must be [..., K] and weight {tuple(weight.shape)} ({weight.dtype}) uint8"
            f" [N, K / 2], with K a multiple of {UNIT}"
        )
    if weight_scale.shape != (n, k // GROUP) or not weight_scale.is_floating_point():
        raise ValueError(
            f"linear_nvfp4: weight_scale {tuple(weight_scale.shape)} ({weight_scale.dtype}) must be floats"
            f" [{n}, {k // GROUP}], one for {GROUP} columns"
        )
    for name, tensor in (("weight_factor", weight_factor), ("bias", bias)):
        if tensor is not None and tensor.shape != (n,):
            raise ValueError(f"linear_nvfp4: {name} {tuple(tensor.shape)} must be [{n}]")


def _supports_cuda(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_factor: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if x.dtype != torch.bfloat16 or weight_factor.dtype != torch.float32:
        return f"x is {x.dtype} and weight_factor {weight_factor.dtype}, not bfloat16 and float32"
    if not weight_factor.is_contiguous() or weight_scale.dtype != FP8:
        return f"weight_factor has strides {weight_factor.stride()}, weight_scale is {weight_scale.dtype}"
    scale = weight_scale.view(torch.bfloat16)  # two in 16 bits
    return int4_linear_cuda.supports_cuda(x, weight, scale, None, bias, MOST_TOKENS)


def linear_nvfp4_cuda(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_factor: torch.Tensor,
    bias: torch.Tensor | None = None, **params: Any,
) -> torch.Tensor:  # fmt: skip
    """params: the last ones of int4_linear_cuda's plan."""
    check(x, weight, weight_scale, weight_factor, bias)
    how = (UNIT, False, bias is not None, True, False)
    return int4_linear_cuda.run(x, weight, weight_scale, weight_factor, bias, *how, fp4=True, **params)


@triton.jit
def _float(bits, MANTISSA: tl.constexpr, MOST: tl.constexpr):
    """The number of an exponent and a mantissa, times a power of two, which makes it an integer."""
    exponent = bits >> MANTISSA & MOST
    whole = (bits & ((1 << MANTISSA) - 1)) | (exponent > 0).to(tl.int32) << MANTISSA
    return (whole << tl.maximum(exponent, 1)).to(tl.float32)


@triton.jit
def decoded(w, low_scale, high_scale, factor):
    """The weights of both halves of bytes, in float32. Scales are the bits of e4m3."""
    low = _float(w, 1, 3) * tl.where(w & 8 != 0, -0.25, 0.25)
    high = _float(w >> 4, 1, 3) * tl.where(w & 128 != 0, -0.25, 0.25)
    factor *= 0.0009765625  # 2^-10
    return low * _float(low_scale, 3, 15) * factor, high * _float(high_scale, 3, 15) * factor


@triton.jit
def _dequantize_kernel(w_ptr, s_ptr, f_ptr, out_ptr, N, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, column = pairs < K // 2, pairs // 16 * 32 + pairs % 16
    first_row, step = row // 16 * 16, pairs // 64
    height = tl.minimum(N - first_row, 16)
    width = 64 if K % 128 == 0 else tl.minimum(K // 2 - 64 * step, 64)
    in_tile = 64 * step * height + (row - first_row) * width + pairs % 64
    w = tl.load(w_ptr + first_row * (K // 2) + in_tile, mask=mask, other=0).to(tl.int32)
    at = first_row * (K // 16) + (pairs // 16 * height + row - first_row) * 2
    factor = tl.load(f_ptr + row)
    to = out_ptr + row * K + column
    low_scale = tl.load(s_ptr + at, mask=mask, other=0).to(tl.int32)
    low, high = decoded(w, low_scale, tl.load(s_ptr + at + 1, mask=mask, other=0).to(tl.int32), factor)
    tl.store(to, low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(to + 16, high.to(out_ptr.dtype.element_ty), mask=mask)


def supports_cublas(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_factor: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why cuBLAS with dequantized weights does not support this call, None if it does."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {x.dtype} is not bfloat16, float16 or float32"
    if weight_scale.dtype != FP8:
        return f"weight_scale is {weight_scale.dtype}, not {FP8}"
    wrong = [t.stride() for t in (weight, weight_scale, weight_factor) if not t.is_contiguous()]
    return f"weight, scales and factors must be contiguous, got strides {wrong[0]}" if wrong else None


def linear_nvfp4_cublas(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_factor: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Dequantize the weight for this call, which many tokens repay."""
    check(x, weight, weight_scale, weight_factor, bias)
    n, k = weight.shape[0], x.shape[-1]
    wide = torch.empty((n, k), dtype=x.dtype, device=x.device)
    if wide.numel():
        block = min(next_power_of_2(k // 2), 2048)
        _dequantize_kernel[n, cdiv(k // 2, block)](
            weight, weight_scale.view(torch.uint8), weight_factor.float(), wide, n, K=k, BLOCK=block
        )
    return F.linear(x, wide, bias)


def _torch(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_factor: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    check(x, weight, weight_scale, weight_factor, bias)
    wide = dequantized(weight, weight_scale, weight_factor.to(torch.promote_types(x.dtype, torch.float32)))
    return F.linear(x.to(wide.dtype), wide, None if bias is None else bias.to(wide.dtype)).to(x.dtype)


linear_nvfp4 = define(
    "linear_nvfp4(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_factor, Tensor? bias=None) -> Tensor",
    fake=output,
    providers=(
        Provider("cuda", linear_nvfp4_cuda, devices=("cuda",), supports=_supports_cuda),
        Provider("triton", linear_nvfp4_cublas, devices=("cuda",), supports=supports_cublas),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    key=units_key(UNIT),
)


def _scale(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Scales over most of the range of e4m3, and some that are 0 or subnormal."""
    return (call.rand(*shape) * 300 * (call.rand(*shape) > 0.1) * call.rand(*shape).pow(4)).to(dtype)


def _factor(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Factors that give outputs of about 1, as in a model."""
    return ((call.rand(*shape) + 0.5) * 0.007 * max(UNIT * call["units"], 1) ** -0.5).to(dtype)


def _case(
    name: str, m: int, k: int, n: int, dtype: str = "bfloat16", weight: float = 1.0, tag: str = "odd", **more: Any
) -> Case:  # fmt: skip
    return Case(name, {"tokens": (m,), "units": k // UNIT, "out": n, **more}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="linear_nvfp4",
    level=1,
    reference=reference,
    op=linear_nvfp4,
    cases=(  # Llama-3.1-8B
        _case("qkv_1", 1, 4096, 6144, weight=32, tag="model"),
        _case("gate_up_1", 1, 4096, 28672, weight=32, tag="model"),
        _case("down_8", 8, 14336, 4096, weight=32, tag="model"),
        _case("gate_up_32", 32, 4096, 28672, weight=32, tag="model"),
        _case("gate_up_2k", 2048, 4096, 28672, tag="model"),
        _case("tokens_63", 63, 256, 130, bias=True),
        _case("tiles_19", 19, 640, 208, bias=True),
        _case("half_5", 5, 288, 48, "float16"),
        _case("float32", 7, 192, 17, "float32", bias=True),
        _case("one", 1, 32, 1),
        Case("batched", {"tokens": (3, 5), "units": 4, "out": 48}, tags=("odd",)),
        _case("empty", 0, 128, 33),
    ),
    arguments=(
        Tensor("x", "*tokens 32*units"),
        Tensor("weight", "out 16*units", "uint8", values=packed_values),
        Tensor("weight_scale", "out 2*units", "float8_e4m3fn", values=_scale),
        Tensor("weight_factor", "out", "float32", values=_factor),
        Tensor("bias", "out", when="bias"),
    ),
    outputs=(Tensor("out", "*tokens out"),),
    axes={"tokens": Axis.per_call(), "units": Axis.count(), "out": Axis.width()},
    flops="2 * prod(tokens) * 32 * units * out",
    tolerance={
        "float32": Tolerance(2e-5, 2e-5),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
    },
    baseline="cublas",
)  # fmt: skip
