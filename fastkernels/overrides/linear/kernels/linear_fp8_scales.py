"""Shapes and strides of an FP8 linear layer's scales."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

Size = torch.Size
BLOCK = 128  # with block scales: columns of x, and rows and columns of the weight, that share a scale
TENSOR, ROW = 0, 1  # the other granularities: per tensor, per token of x and row of the weight


class Strides(NamedTuple):
    """Strides of the scales in elements, 0 where one scale is shared.

    x_token, x_block          of x's scales: by token, by block of K
    weight_row, weight_block  of the weight's scales: by row (ROW) or block of rows (BLOCK), by block of K
    """

    x_token: int
    x_block: int
    weight_row: int
    weight_block: int


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def granularity(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> int:
    """Return TENSOR (one scale for x, one for the weight), ROW (per token, per row of the weight, or both) or BLOCK.

    A single scale with two dimensions belongs to the only token: ROW. Raises ValueError for other scales.
    """
    return _granularity(x.shape, weight.shape, x_scale.shape, weight_scale.shape)


@lru_cache(maxsize=4096)  # each call needs it several times, for every layer of a step
def _granularity(x: Size, weight: Size, of_x: Size, of_weight: Size) -> int:
    n, k = weight
    tokens = x.numel() // k if k else 0
    x_one, weight_one = of_x.numel() == 1, of_weight.numel() == 1
    x_rows = x_one or (of_x.numel() == tokens and (len(of_x) == 1 or of_x[-1] == 1))
    weight_rows = weight_one or of_weight in ((n,), (n, 1))
    if x_rows and weight_rows:
        return TENSOR if x_one and weight_one and len(of_x) < 2 else ROW
    groups = blocks(k)
    if of_weight == (blocks(n), groups) and of_x and of_x[-1] == groups and of_x.numel() == tokens * groups:
        return BLOCK
    raise ValueError(
        f"linear_fp8: x {tuple(x)} and weight {(n, k)} with scales {tuple(of_x)} and {tuple(of_weight)}: x_scale"
        f" must have one value, one per token ({tokens}, 1), or with weight_scale ({blocks(n)}, {groups}) one per token"
        f" and {BLOCK} columns ({tokens}, {groups}); weight_scale one value or one per row ({n},)"
    )


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> int:
    """Return the granularity. Raises ValueError for tensors whose shapes do not match."""
    of_bias = None if bias is None else bias.shape
    return _checked(x.shape, weight.shape, x_scale.shape, weight_scale.shape, of_bias)


@lru_cache(maxsize=4096)
def _checked(x: Size, weight: Size, x_scale: Size, weight_scale: Size, bias: Size | None) -> int:
    if len(weight) != 2 or len(x) == 0 or x[-1] != weight[1]:
        raise ValueError(f"linear_fp8: x {tuple(x)} must be [..., K] and weight {tuple(weight)} [N, K]")
    if bias is not None and bias != (weight[0],):
        raise ValueError(f"linear_fp8: bias {tuple(bias)} must be [{weight[0]}]")
    return _granularity(x, weight, x_scale, weight_scale)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Return contiguous x [..., K] as [tokens, K]. A matrix is returned as it is: a view costs 1 us of CPU time."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def column(scale: torch.Tensor) -> torch.Tensor:
    """Return a single scale, or scales per token or row, as [n, 1]."""
    return scale if scale.dim() == 2 and scale.shape[1] == 1 else scale.reshape(-1, 1)


def shaped(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return y [tokens, N] as [..., N], with the leading dimensions of x [..., K]."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def strides(kind: int, x_scale: torch.Tensor, weight_scale: torch.Tensor) -> tuple[torch.Tensor, Strides]:
    """Return x_scale with one row per token, and the strides of both scales."""
    groups = x_scale.shape[-1] if kind == BLOCK else 1
    rows = x_scale if kind == BLOCK and x_scale.dim() == 2 else x_scale.reshape(-1, groups)
    x_token = rows.stride(0) if rows.shape[0] > 1 else 0
    weight_row = weight_scale.stride(0) if weight_scale.numel() > 1 else 0
    if kind != BLOCK:
        return rows, Strides(x_token, 0, weight_row, 0)
    return rows, Strides(x_token, rows.stride(1), weight_row, weight_scale.stride(1))


def expanded(scale: torch.Tensor, rows: int, columns: int, kind: int, step: int) -> torch.Tensor:
    """Return scales that broadcast to [rows, columns]; a row of block scales covers `step` rows."""
    if kind != BLOCK:
        return scale.reshape(-1, 1)
    return (
        scale.reshape(-1, blocks(columns)).repeat_interleave(step, 0)[:rows]
        .repeat_interleave(BLOCK, 1)[:, :columns]
    )  # fmt: skip


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
