"""SGLang's FP8 linear layers; what they compute is the op `linear_fp8`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.l1._fp8 import FP8, refuse
from fastkernels.overrides.l1._linear_fp8_scales import ROW
from fastkernels.overrides.l1.quantize_fp8 import quantize_fp8

Quantized = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.dtype | None]


def _linear_fp8(*args: Any) -> torch.Tensor:
    return torch.ops.fastkernels.linear_fp8.default(*args)  # of the file that imports this one


class SGLangCompressedTensorsW8A8Fp8:
    """sglang...compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8: a linear layer with a scale a row of its weight.

    Raises ValueError for weights with one scale, or scales of blocks, and for scales of x that are given.
    """

    live_methods = ("apply_weights",)

    @staticmethod
    def supports(module: Any) -> str | None:
        """None if our op serves this layer of the host, else the reason."""
        scheme, weight, scale = module.scheme, module.weight, module.weight_scale
        if (reason := _no_rows(scheme)) is not None:
            return reason
        if weight.dtype != FP8 or scale.dtype != torch.float32:
            return f"weight is {weight.dtype}, its scales are {scale.dtype}"
        if not weight.t().is_contiguous() or scale.numel() != weight.shape[1]:
            return f"weight {tuple(weight.shape)} has strides {weight.stride()} and {scale.numel()} scales"
        return None

    def __init__(self, weight_quant: Any, is_static_input_scheme: bool):
        self.weight_quant = weight_quant
        self.strategy = weight_quant.strategy
        self.is_static_input_scheme = is_static_input_scheme
        self.weight_block_size = weight_quant.block_structure
        if (reason := _no_rows(self)) is not None:
            refuse("CompressedTensorsW8A8Fp8", weight_quant=reason)

    def apply_weights(
        self, layer: Any, x: torch.Tensor | Quantized, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., K], or as (values, scales, dtype of the result) if it is float8 already. Returns [..., N].

        layer.weight: [K, N], whose columns are contiguous; layer.weight_scale: [N, 1].
        """
        if isinstance(x, tuple):
            q, scale, out_dtype = x[0], x[1], x[2] if len(x) > 2 else None
        else:
            q, scale = quantize_fp8(x, None, -1, None, 0.0)  # a token of zeros has scale 0, as the host's
            out_dtype = x.dtype
        return _linear_fp8(q, layer.weight.t(), scale, layer.weight_scale.reshape(-1), bias, out_dtype)


def sglang_shape(module: nn.Module) -> tuple[int, int, int, torch.dtype] | None:
    """The op's shape of a layer with SGLang's scheme: N, K, scales, dtype of the result. None if it is not ours."""
    layer: Any = module
    scheme, dtype = vars(module).get("scheme"), getattr(layer, "orig_dtype", None)
    if dtype is None or not hasattr(scheme, "is_static_input_scheme") or _no_rows(scheme) is not None:
        return None
    return layer.weight.shape[1], layer.weight.shape[0], ROW, dtype


def _no_rows(scheme: Any) -> str | None:
    """Why the scheme does not quantize the weight row by row and x token by token; None if it does."""
    if scheme.weight_block_size is not None or scheme.strategy != "channel":
        strategy = getattr(scheme.strategy, "value", scheme.strategy)
        return f"its weight has scales by {strategy}, not by channel"
    return "the scale of x is given" if scheme.is_static_input_scheme else None


def sglang_fp8_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """sglang.kernels.ops.gemm.fp8_scaled_mm: mat_a [M, K] times mat_b [K, N], scales of each row and each column."""
    return _linear_fp8(mat_a, mat_b.t(), scales_a, scales_b.reshape(-1), bias, out_dtype)
