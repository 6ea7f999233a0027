"""Quantization by token and by group of columns, for a fork: scales of whole tensors are left to the host."""

from __future__ import annotations

import torch

from fastkernels.core.dispatch import INTERPRETED, Unsupported, register  # type: ignore[attr-defined]  # of fork.py
from fastkernels.overrides.kit.fp8 import FP8, MAX_COLUMNS, MIN_ABSMAX, ValuesAndScales
from fastkernels.overrides.kit.rows import FLOATS, rows
from fastkernels.overrides.quant.groups import launch_groups


def quantize(
    x: torch.Tensor, width: int, ub: torch.Tensor | None, eps: float, by_column: bool, aligned: bool, ue8m0: bool
) -> ValuesAndScales:  # fmt: skip
    q, s = outputs(x, width, ub, eps, by_column, aligned)
    launch_groups(x, ub, q, s, rows(x) or (1, 0, 0), x.shape[-1], width, eps, ue8m0)
    return q, s


def outputs(
    x: torch.Tensor, width: int, ub: torch.Tensor | None, eps: float, by_column: bool, aligned: bool, *_: bool
) -> ValuesAndScales:  # fmt: skip
    q, (*tokens, n) = torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format), x.shape
    if not by_column:
        return q, x.new_empty((*tokens, n // width), dtype=torch.float32)
    padded = -(-len(x) // 4) * 4 if aligned else len(x)
    return q, x.new_empty((n // width, padded), dtype=torch.float32).t()[: len(x)]


# by_column, aligned: scales of adjacent tokens are adjacent, and each column is padded to a multiple of 4
quantize_groups = register(
    "quantize_groups(Tensor x, int width, Tensor? ub, float eps, bool by_column, bool aligned, bool ue8m0)"
    " -> (Tensor, Tensor)",
    quantize, outputs,
)  # fmt: skip


def quantize_fp8(
    x: torch.Tensor, scale: torch.Tensor | None = None, group_size: int = 0, scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX, by_column: bool = False, aligned: bool = False, ue8m0: bool = False,
) -> ValuesAndScales:  # fmt: skip
    width = x.shape[-1] if group_size < 0 else group_size
    fits = 0 < width <= MAX_COLUMNS and x.shape[-1] % width == 0 and 0 < x.numel() < 1 << 38
    layout = x.dtype in FLOATS and rows(x) is not None and (x.dim() == 2 or not by_column)
    if scale is not None or not ((x.is_cuda or INTERPRETED) and fits and layout):
        raise Unsupported
    return quantize_groups(x, width, scale_ub, min_absmax, by_column, aligned, ue8m0)
