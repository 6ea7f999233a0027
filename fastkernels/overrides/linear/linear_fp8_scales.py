"""Where the scales of an FP8 linear layer lie, for all that computes one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

Size = torch.Size
BLOCK = 128  # columns of x, and rows and columns of the weight, that share a scale where scales are of blocks
TENSOR, ROW = 0, 1


class Strides(NamedTuple):
    """Numbers from one scale to the next, 0 where all share it: of x by token and by block of K, of the weight by row
    (ROW) or block of rows (BLOCK), and by block of K."""

    x_token: int
    x_block: int
    weight_row: int
    weight_block: int


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def granularity(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> int:
    """TENSOR: one scale for x and one for the weight; ROW: a scale a token, a row of the weight, or both; BLOCK.

    One scale of two dimensions is that of the only token.

    Raises ValueError for scales that are none of these.
    """
    return _granularity(x.shape, weight.shape, x_scale.shape, weight_scale.shape)


@lru_cache(maxsize=4096)  # a call asks for it several times, and so do all layers of a step
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
        f" must have one value, one a token ({tokens}, 1), or with weight_scale ({blocks(n)}, {groups}) one a token and"
        f" {BLOCK} columns ({tokens}, {groups}); weight_scale one value or one a row ({n},)"
    )


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> int:
    """The granularity. Raises ValueError for tensors that do not fit each other."""
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
    """x [..., K], contiguous, as [tokens, K]: itself if it is that, since a view takes the CPU a microsecond."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def column(scale: torch.Tensor) -> torch.Tensor:
    """One scale, or one a token or row, as [..., 1] of two dimensions."""
    return scale if scale.dim() == 2 and scale.shape[1] == 1 else scale.reshape(-1, 1)


def shaped(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y [tokens, N] as [..., N] for the tokens of x [..., K]."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def strides(kind: int, x_scale: torch.Tensor, weight_scale: torch.Tensor) -> tuple[torch.Tensor, Strides]:
    """(x_scale as one row a token, where the scales lie)."""
    groups = x_scale.shape[-1] if kind == BLOCK else 1
    rows = x_scale if kind == BLOCK and x_scale.dim() == 2 else x_scale.reshape(-1, groups)
    x_token = rows.stride(0) if rows.shape[0] > 1 else 0
    weight_row = weight_scale.stride(0) if weight_scale.numel() > 1 else 0
    if kind != BLOCK:
        return rows, Strides(x_token, 0, weight_row, 0)
    return rows, Strides(x_token, rows.stride(1), weight_row, weight_scale.stride(1))


def expanded(scale: torch.Tensor, rows: int, columns: int, kind: int, step: int) -> torch.Tensor:
    """Scales that broadcast to [rows, columns]; of blocks: a row of them stands for `step` rows."""
    if kind != BLOCK:
        return scale.reshape(-1, 1)
    return (
        scale.reshape(-1, blocks(columns)).repeat_interleave(step, 0)[:rows]
        .repeat_interleave(BLOCK, 1)[:, :columns]
    )  # fmt: skip


def holder_of(module: nn.Module) -> Any:
    """What holds the kernel object of a host's quantized linear layer, as `fp8_linear`; None for another module."""
    found = (vars(module).get(name) for name in ("quant_method", "scheme"))
    return next((holder for holder in found if "fp8_linear" in getattr(holder, "__dict__", ())), None)
