"""Drop-in float8 quantization for vLLM: the QuantFP8 layer and functions of vllm._custom_ops and fp8_utils."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.fp8 import FP8, GROUP_EPS, MIN_ABSMAX, ValuesAndScales
from fastkernels.overrides.kit.fp8_arguments import padded, padding, refuse, written
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.quant.rms_norm_quant_fp8 import rms_norm_quant_fp8
from fastkernels.overrides.quant.silu_mul_quant_fp8 import silu_mul_quant_fp8


class GroupShape(NamedTuple):
    """vLLM's GroupShape, rows and columns that share a scale: (-1, -1) a tensor, (1, -1) a token, (1, 128) a group."""

    row: int
    col: int


class VllmQuantFP8(nn.Module):
    """input_quant_fp8.QuantFP8: x [..., N] -> (values, scales).

    group_shape is the host's GroupShape or any (row, col). use_ue8m0=None means False: powers of two are for Blackwell.
    Raises ValueError for a group_shape that is neither a tensor, a token nor a group of columns.
    """

    def __init__(
        self,
        static: bool,
        group_shape: GroupShape,
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool | None = None,
        compile_native: bool = True,
    ):
        super().__init__()
        self.static = static
        self.group_shape = group_shape
        self.num_token_padding = num_token_padding
        self.column_major_scales = column_major_scales
        self.tma_aligned_scales = tma_aligned_scales
        self.use_ue8m0 = bool(use_ue8m0)
        row, col = group_shape
        self.is_group_quant = row == 1 and col >= 1
        self.use_per_token_if_dynamic = (row, col) == (1, -1)
        if self.is_group_quant:
            self.group_size = col
        if static and (row, col) != (-1, -1):
            raise ValueError(f"QuantFP8: static scales of group_shape {tuple(group_shape)} are not supported")
        if not static and not self.is_group_quant and (row, col) not in ((1, -1), (-1, -1)):
            raise ValueError(f"QuantFP8: group_shape {tuple(group_shape)} is not (-1, -1), (1, -1) or (1, n)")

    def forward(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None = None,
        scale_ub: torch.Tensor | None = None,
        use_triton: bool = False,
    ) -> ValuesAndScales:
        if (scale is not None) != self.static:
            raise ValueError("QuantFP8: static quantization needs a scale; dynamic quantization takes none")
        if self.is_group_quant:
            layout = (self.column_major_scales, self.tma_aligned_scales, self.use_ue8m0)
            return quantize_fp8(x, None, self.group_size, None, GROUP_EPS, *layout)
        per_token = not self.static and self.use_per_token_if_dynamic
        if scale_ub is not None and not per_token:
            raise ValueError("QuantFP8: scale_ub is for dynamic scales of tokens")
        q, found = quantize_fp8(x, scale, -1 if per_token else 0, scale_ub)
        more = padding(x, self.num_token_padding)
        return padded((q, found if scale is None else scale), more, per_token)


def vllm_scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> ValuesAndScales:
    """_custom_ops.scaled_fp8_quant: input [M, N] -> (values [M, N], scales [1] or [M, 1]).

    Raises ValueError for a given scale of more than one value.
    """
    more = padding(input, num_token_padding)
    per_token = scale is None and use_per_token_if_dynamic
    found = quantize_fp8(input, scale, -1 if per_token else 0, scale_ub if per_token else None)
    q, scales = padded(found, more, per_token)
    return q if output is None else output.copy_(q), scales if scale is None else scale


def vllm_per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> ValuesAndScales:
    """fp8_utils.per_token_group_quant_fp8: x [..., N] -> (values, scales [..., N / g])."""
    refuse("per_token_group_quant_fp8", dtype=None if dtype == FP8 else dtype)
    layout = (column_major_scales, tma_aligned_scales, bool(use_ue8m0))
    return written(quantize_fp8(x, None, group_size, None, eps, *layout), out_q, None)


def vllm_rms_norm_dynamic_per_token_quant(
    input: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    scale_ub: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> ValuesAndScales:
    """_custom_ops.rms_norm_dynamic_per_token_quant, float8 e4m3 only: (values [..., H], scales [tokens, 1]).

    The residual's memory is overwritten with input + residual. Raises ValueError for another quant_dtype.
    """
    refuse("rms_norm_dynamic_per_token_quant", quant_dtype=None if quant_dtype == FP8 else quant_dtype)
    q, scales = rms_norm_quant_fp8(input, weight, epsilon, None, -1, residual, scale_ub)
    return q, scales.view(-1, 1)


def vllm_rms_norm_per_block_quant(
    input: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: list[int],
    scale_ub: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_scale_transposed: bool = False,
    tma_alignment: int = 0,
) -> ValuesAndScales:
    """_custom_ops.rms_norm_per_block_quant, float8 e4m3 only: (values [T, H], scales [T, H / group_size[1]]).

    is_scale_transposed: column-major scales, padded to tma_alignment (0 or 4) tokens. The residual's memory is
    overwritten with input + residual. Raises ValueError for another quant_dtype.
    """
    refuse(
        "rms_norm_per_block_quant", quant_dtype=None if quant_dtype == FP8 else quant_dtype,
        tma_alignment=None if tma_alignment in (0, 4) else tma_alignment,
    )  # fmt: skip
    layout = (is_scale_transposed, tma_alignment == 4)
    return rms_norm_quant_fp8(
        input, weight, epsilon, None, group_size[1], residual, scale_ub, MIN_ABSMAX, *layout
    )


def vllm_silu_and_mul_per_block_quant(
    input: torch.Tensor,
    group_size: int,
    quant_dtype: torch.dtype,
    scale_ub: torch.Tensor | None = None,
    is_scale_transposed: bool = False,
) -> ValuesAndScales:
    """_custom_ops.silu_and_mul_per_block_quant, float8 e4m3 only: input [T, 2 * d] -> (values, scales).

    Raises ValueError for another quant_dtype.
    """
    refuse("silu_and_mul_per_block_quant", quant_dtype=None if quant_dtype == FP8 else quant_dtype)
    return silu_mul_quant_fp8(input, None, group_size, scale_ub, MIN_ABSMAX, is_scale_transposed)


def vllm_silu_mul_per_token_group_quant_fp8_colmajor_0_26(
    input: torch.Tensor,
    output: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
    eps: float = 1e-10,
    clamp_limit: float | None = None,
    group_size: int = 128,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> ValuesAndScales:
    """fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor of 0.26; see the function from 0.32."""
    return vllm_silu_mul_per_token_group_quant_fp8_colmajor(
        input, output, use_ue8m0, eps, clamp_limit, group_size, alpha, beta
    )


def vllm_silu_mul_per_token_group_quant_fp8_colmajor(
    input: torch.Tensor,
    output: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
    eps: float = 1e-10,
    clamp_limit: float | None = None,
    group_size: int = 128,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    expert_ends: torch.Tensor | None = None,
    expert_alignment: int = 0,
) -> ValuesAndScales:
    """fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor from 0.32 on.

    input [T, 2 * d] -> (values [T, d], column-major scales [T, d / group_size]), for any T; the host needs multiples.
    Raises ValueError for clamp_limit and an activation other than silu. Unlike the host, it also quantizes the rows
    that are padding according to expert_ends.
    """
    refuse(
        "silu_mul_per_token_group_quant_fp8_colmajor", clamp_limit=clamp_limit,
        alpha=None if alpha == 1.0 else alpha, beta=None if beta == 0.0 else beta,
    )  # fmt: skip
    return written(
        silu_mul_quant_fp8(input, None, group_size, None, eps, True, bool(use_ue8m0)), output, None
    )


_OPS = "vllm._custom_ops:"
_QUANTIZATION = "vllm.model_executor.layers.quantization."
_COLMAJOR = "silu_mul_per_token_group_quant_fp8_colmajor"
_NOTE = "vLLM's linear layers, MoE kernels and fusion passes bind the function at import: for forks and for our engine"


def _function(path: str, cls: str, versions: str = "") -> Target:
    return Target("vllm", path, cls, "function", versions, note=_NOTE)


TARGETS = {
    "quantize_fp8": (
        Target("vllm", f"{_QUANTIZATION}input_quant_fp8:QuantFP8", "VllmQuantFP8", "standalone", note=_NOTE),
        _function(_OPS + "scaled_fp8_quant", "vllm_scaled_fp8_quant"),
        _function(
            f"{_QUANTIZATION}utils.fp8_utils:per_token_group_quant_fp8", "vllm_per_token_group_quant_fp8"
        ),
    ),
    "rms_norm_quant_fp8": (
        _function(_OPS + "rms_norm_dynamic_per_token_quant", "vllm_rms_norm_dynamic_per_token_quant"),
        _function(_OPS + "rms_norm_per_block_quant", "vllm_rms_norm_per_block_quant"),
    ),
    "silu_mul_quant_fp8": (
        _function(_OPS + "silu_and_mul_per_block_quant", "vllm_silu_and_mul_per_block_quant"),
        _function(f"{_QUANTIZATION}utils.fp8_utils:{_COLMAJOR}", f"vllm_{_COLMAJOR}_0_26", "<0.32"),
        _function(f"{_QUANTIZATION}utils.fp8_utils:{_COLMAJOR}", f"vllm_{_COLMAJOR}", ">=0.32"),
    ),
}
