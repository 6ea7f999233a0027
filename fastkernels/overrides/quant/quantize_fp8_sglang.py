"""SGLang's functions that quantize to float8; what they compute is the op `quantize_fp8`."""

from __future__ import annotations

import torch

from fastkernels.core import registry
from fastkernels.overrides.kit.fp8 import FP8, Pair, padded, refuse, written


def _quantize(*args: object) -> Pair:
    return registry.get("quantize_fp8").op(*args)


def sglang_per_token_group_quant_fp8_0_5_16(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    enable_v2: bool | None = None,
) -> Pair:
    """sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_group_quant_fp8 of 0.5.16; see that from 0.5.23."""
    return sglang_per_token_group_quant_fp8(
        x, group_size, eps, column_major_scales, scale_tma_aligned, scale_ue8m0, fuse_silu_and_mul, masked_m
    )


def sglang_per_token_group_quant_fp8_0_5_17(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
) -> Pair:
    """sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_group_quant_fp8 of 0.5.17; see that from 0.5.23."""
    return sglang_per_token_group_quant_fp8(
        x, group_size, eps, column_major_scales, scale_tma_aligned, scale_ue8m0, fuse_silu_and_mul, masked_m
    )


def sglang_per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    *,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
) -> Pair:
    """sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_group_quant_fp8 from 0.5.23 on.

    x [..., N] -> (values, scales [..., N / g]). Raises ValueError for fuse_silu_and_mul (see silu_mul_quant_fp8),
    masked_m and scale_ue8m0 with column-major scales, which the host packs into integers for Blackwell.
    """
    packed = scale_ue8m0 and column_major_scales
    refuse(
        "per_token_group_quant_fp8",
        fuse_silu_and_mul=fuse_silu_and_mul,
        masked_m=masked_m,
        scale_ue8m0=packed,
    )
    found = _quantize(x, None, group_size, None, eps, column_major_scales, scale_tma_aligned, scale_ue8m0)
    return written(found, output_q, output_s)


def sglang_per_token_quant_fp8_0_5_17(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Pair:
    """sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_quant_fp8 before 0.5.23.

    x [T, N] -> (values, scales [T, 1]); a token of zeros has scale 0.
    """
    refuse("per_token_quant_fp8", dtype=None if dtype == FP8 else dtype)
    return _quantize(x, None, -1, None, 0.0)


def sglang_per_token_quant_fp8(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
) -> Pair:
    """sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_quant_fp8 from 0.5.23 on; see that of 0.5.17."""
    return written(sglang_per_token_quant_fp8_0_5_17(x, dtype), output_q, output_s)


def sglang_static_quant_fp8(x: torch.Tensor, x_s: torch.Tensor, repeat_scale: bool = False) -> Pair:
    """sglang.kernels.ops.quantization.fp8_kernel.static_quant_fp8; repeat_scale: the scale as [tokens, 1]."""
    q, scale = _quantize(x, x_s)
    return q, scale.repeat(x.numel() // x.shape[-1], 1) if repeat_scale else x_s


def sglang_scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    use_per_token_if_dynamic: bool = False,
) -> Pair:
    """sglang.kernels.ops.quantization.fp8_kernel.scaled_fp8_quant; zeros alone have scale 0."""
    per_token = scale is None and use_per_token_if_dynamic
    q, found = _quantize(input, scale, -1 if per_token else 0, None, 0.0)
    return padded((q, found if scale is None else scale), num_token_padding, per_token)
