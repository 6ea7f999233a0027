"""SGLang's FP8 linear layers: which of them the op `linear_fp8` serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import Op
from fastkernels.overrides.kit.fp8 import FP8, refuse
from fastkernels.overrides.linear.linear_fp8_scales import ROW

NOT_FASTER = "no tuned table says that ours is faster for this number of tokens"
Apply = Callable[..., torch.Tensor]


class SGLangScheme:
    """What is known of a scheme of SGLang's before it is called; see linear_fp8.SGLangCompressedTensorsW8A8Fp8."""

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


def by_table(op: Op, quantize: Op, theirs: Apply, ours: Apply) -> Apply:
    """apply_weights of a layer that a table has put in: `ours` where the table says that it is faster, else `theirs`.

    op, quantize: linear_fp8, quantize_fp8. A call of theirs runs no op of ours, which launched one by one costs more
    than it does, and is counted as left to the host. What was asked for by name is ours; so is what torch.compile
    traces, where nothing can be counted.
    """

    def apply_weights(self: Any, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if (
            torch.compiler.is_compiling()
            or "named" in (op.asked, quantize.asked)
            or op.winner(*_call(layer.weight, x)) is not None
        ):
            return ours(self, layer, x, bias)
        op.leave(NOT_FASTER)
        return theirs(self, layer, x, bias)

    return apply_weights


def sglang_shape(module: nn.Module) -> tuple[int, int, int, torch.dtype] | None:
    """The op's shape of a layer with SGLang's scheme: N, K, scales, dtype of the result. None if it is not ours."""
    layer: Any = module
    scheme, dtype = vars(module).get("scheme"), getattr(layer, "orig_dtype", None)
    if dtype is None or not hasattr(scheme, "is_static_input_scheme") or _no_rows(scheme) is not None:
        return None
    return layer.weight.shape[1], layer.weight.shape[0], ROW, dtype


def _call(weight: torch.Tensor, x: Any) -> tuple[str, tuple[Any, ...], tuple[int]]:
    """Device and key of the op's call for a weight [K, N], by sizes and dtypes only; x as apply_weights takes it."""
    (k, n), values = weight.shape, x
    if isinstance(x, tuple):
        values, dtype = x[0], (x[2] if len(x) > 2 else None) or torch.bfloat16
    else:
        dtype = x.dtype
    return values.device.type, (n, k, ROW, dtype), (values.numel() // k,)


def _no_rows(scheme: Any) -> str | None:
    """Why the scheme does not quantize the weight row by row and x token by token; None if it does."""
    if scheme.weight_block_size is not None or scheme.strategy != "channel":
        strategy = getattr(scheme.strategy, "value", scheme.strategy)
        return f"its weight has scales by {strategy}, not by channel"
    return "the scale of x is given" if scheme.is_static_input_scheme else None
