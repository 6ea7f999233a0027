"""Quantized linear layers of live hosts: where they keep their kernel, and the op `linear_fp8`'s shape of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.linear.linear_fp8_scales import ROW, TENSOR


def holder_of(module: nn.Module) -> Any:
    """Return the object that holds a quantized layer's kernel as `fp8_linear`, None for any other module."""
    found = (vars(module).get(name) for name in ("quant_method", "scheme"))
    return next((holder for holder in found if "fp8_linear" in getattr(holder, "__dict__", ())), None)


def shape_of(module: nn.Module) -> tuple[int, int, int, torch.dtype] | None:
    """Return (N, K, granularity, output dtype) of a layer with vLLM's CUTLASS kernel or SGLang's scheme, else None.

    The weight of both is [K, N].
    """
    holder = holder_of(module)
    weight, scale = getattr(module, "weight", None), getattr(module, "weight_scale", None)
    if weight is None or scale is None or weight.dim() != 2:
        return None
    if holder is None:
        return _scheme_shape(module)
    config = holder.fp8_linear.config
    per_tensor = scale.numel() == 1 and config.activation_quant_key.scale.group_shape.is_per_tensor()
    return weight.shape[1], weight.shape[0], TENSOR if per_tensor else ROW, config.out_dtype or torch.bfloat16


def _scheme_shape(module: nn.Module) -> tuple[int, int, int, torch.dtype] | None:
    layer: Any = module
    scheme, dtype = vars(module).get("scheme"), getattr(layer, "orig_dtype", None)
    if dtype is None or not hasattr(scheme, "is_static_input_scheme") or not_by_row(scheme) is not None:
        return None
    return layer.weight.shape[1], layer.weight.shape[0], ROW, dtype


def not_by_row(scheme: Any) -> str | None:
    """Return why SGLang's scheme does not quantize weights by row and inputs by token, None if it does."""
    if scheme.weight_block_size is not None or scheme.strategy != "channel":
        strategy = getattr(scheme.strategy, "value", scheme.strategy)
        return f"its weight has scales by {strategy}, not by channel"
    return "the scale of x is given" if scheme.is_static_input_scheme else None
