"""Drop-in float8 quantization for SGLang: functions of its fp8_kernel, its norms and its mixtures of experts."""

from __future__ import annotations

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.fp8 import FP8, ValuesAndScales
from fastkernels.overrides.kit.fp8_arguments import padded, padding, refuse, written
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.quant.rms_norm_quant_fp8 import rms_norm_quant_fp8
from fastkernels.overrides.quant.silu_mul_quant_fp8 import silu_mul_quant_fp8


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
) -> ValuesAndScales:
    """fp8_kernel.sglang_per_token_group_quant_fp8 of 0.5.16; see the function from 0.5.23."""
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
) -> ValuesAndScales:
    """fp8_kernel.sglang_per_token_group_quant_fp8 of 0.5.17; see the function from 0.5.23."""
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
) -> ValuesAndScales:
    """fp8_kernel.sglang_per_token_group_quant_fp8 from 0.5.23 on: x [..., N] -> (values, scales [..., N / g]).

    Raises ValueError for fuse_silu_and_mul (see silu_mul_quant_fp8), masked_m, and scale_ue8m0 with column-major
    scales, which the host packs into integers for Blackwell.
    """
    packed = scale_ue8m0 and column_major_scales
    refuse(
        "per_token_group_quant_fp8",
        fuse_silu_and_mul=fuse_silu_and_mul,
        masked_m=masked_m,
        scale_ue8m0=packed or None,
    )
    found = quantize_fp8(x, None, group_size, None, eps, column_major_scales, scale_tma_aligned, scale_ue8m0)
    return written(found, output_q, output_s)


def sglang_per_token_quant_fp8_0_5_17(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> ValuesAndScales:
    """fp8_kernel.sglang_per_token_quant_fp8 before 0.5.23: x [T, N] -> (values, scales [T, 1]).

    A token of zeros has scale 0.
    """
    refuse("per_token_quant_fp8", dtype=None if dtype == FP8 else dtype)
    return quantize_fp8(x, None, -1, None, 0.0)


def sglang_per_token_quant_fp8(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
) -> ValuesAndScales:
    """fp8_kernel.sglang_per_token_quant_fp8 from 0.5.23 on; see the function of 0.5.17."""
    return written(sglang_per_token_quant_fp8_0_5_17(x, dtype), output_q, output_s)


def sglang_static_quant_fp8(
    x: torch.Tensor, x_s: torch.Tensor, repeat_scale: bool = False
) -> ValuesAndScales:
    """fp8_kernel.static_quant_fp8; repeat_scale: return the scale as [tokens, 1]."""
    q, scale = quantize_fp8(x, x_s)
    return q, scale.repeat(x.numel() // x.shape[-1], 1) if repeat_scale else x_s


def sglang_scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    use_per_token_if_dynamic: bool = False,
) -> ValuesAndScales:
    """fp8_kernel.scaled_fp8_quant; a tensor of zeros has scale 0."""
    more = padding(input, num_token_padding)
    per_token = scale is None and use_per_token_if_dynamic
    q, found = quantize_fp8(input, scale, -1 if per_token else 0, None, 0.0)
    return padded((q, found if scale is None else scale), more, per_token)


def sglang_fused_rmsnorm_fp8_per_token_quant(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor | None = None,
) -> ValuesAndScales | tuple[ValuesAndScales, torch.Tensor]:
    """_fused_rmsnorm_fp8_per_token_quant, which the host uses on AMD's devices: (values [T, H], scales [T, 1]).

    With a residual, returns ((values, scales), hidden_states + residual); the sum is a new tensor.
    """
    if residual is None:
        return rms_norm_quant_fp8(hidden_states, weight, epsilon)
    new = residual.clone()
    return rms_norm_quant_fp8(hidden_states, weight, epsilon, None, -1, new), new


def sglang_silu_mul_static_tensorwise_quant_for_cutlass_moe(
    input: torch.Tensor,
    output: torch.Tensor,
    scale: torch.Tensor,
    num_tokens_tensor: torch.Tensor,
    expected_num_tokens: int,
    intermediate_size: int,
) -> None:
    """ep_moe_kernels.silu_mul_static_tensorwise_quant_for_cutlass_moe.

    Fills the first num_tokens_tensor rows of output [T, d] from input [T, 2 * d]. expected_num_tokens only sizes the
    host's grid and is ignored. Raises ValueError if intermediate_size is not d.
    """
    if 2 * intermediate_size != input.shape[-1]:
        raise ValueError(f"intermediate_size {intermediate_size} is not half of {input.shape[-1]} columns")
    q, _ = silu_mul_quant_fp8(input, scale)
    used = torch.arange(input.shape[0], device=input.device)[:, None] < num_tokens_tensor
    output.view(torch.uint8).copy_(torch.where(used, q.view(torch.uint8), output.view(torch.uint8)))


_KERNELS = "sglang.kernels.ops.quantization.fp8_kernel:"
_GROUPS, _TOKENS = "sglang_per_token_group_quant_fp8", "sglang_per_token_quant_fp8"
_FUSED_NORM = "_fused_rmsnorm_fp8_per_token_quant"
_CUTLASS = "silu_mul_static_tensorwise_quant_for_cutlass_moe"
_NOTE = "SGLang's linear layers and MoE kernels bind the function at import: for forks and for our engine"
_DTYPE = "the default is the host's fp8 type, whose first definition is AMD's; " + _NOTE
_AMD = "SGLang uses it on AMD's devices only; " + _NOTE


def _function(path: str, cls: str, versions: str = "", note: str = _NOTE) -> Target:
    return Target("sglang", path, cls, "function", versions, note=note)


TARGETS = {
    "quantize_fp8": (
        _function(_KERNELS + _GROUPS, f"{_GROUPS}_0_5_16", "<0.5.17"),
        _function(_KERNELS + _GROUPS, f"{_GROUPS}_0_5_17", ">=0.5.17,<0.5.23"),
        _function(_KERNELS + _GROUPS, _GROUPS, ">=0.5.23"),
        _function(_KERNELS + _TOKENS, f"{_TOKENS}_0_5_17", "<0.5.23", _DTYPE),
        _function(_KERNELS + _TOKENS, _TOKENS, ">=0.5.23", _DTYPE),
        _function(_KERNELS + "static_quant_fp8", "sglang_static_quant_fp8"),
        _function(_KERNELS + "scaled_fp8_quant", "sglang_scaled_fp8_quant"),
    ),
    "rms_norm_quant_fp8": (
        _function(f"sglang.srt.layers.communicator:{_FUSED_NORM}", f"sglang{_FUSED_NORM}", "<0.5.23", _AMD),
        _function(
            f"sglang.srt.layers.layer_boundary.residual.add_norm:{_FUSED_NORM}",
            f"sglang{_FUSED_NORM}",
            ">=0.5.23",
            _AMD,
        ),
    ),
    "silu_mul_quant_fp8": (
        _function(f"sglang.kernels.ops.moe.ep_moe_kernels:{_CUTLASS}", f"sglang_{_CUTLASS}"),
    ),
}
