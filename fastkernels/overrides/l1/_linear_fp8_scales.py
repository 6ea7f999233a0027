"""Where the scales of an FP8 linear layer lie, for all that computes one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

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
    n, k = weight.shape
    tokens = x.numel() // k if k else 0
    of_x, of_weight = tuple(x_scale.shape), tuple(weight_scale.shape)
    x_one, weight_one = x_scale.numel() == 1, weight_scale.numel() == 1
    x_rows = x_one or (x_scale.numel() == tokens and (len(of_x) == 1 or of_x[-1] == 1))
    weight_rows = weight_one or of_weight in ((n,), (n, 1))
    if x_rows and weight_rows:
        return TENSOR if x_one and weight_one and len(of_x) < 2 else ROW
    groups = blocks(k)
    if (
        of_weight == (blocks(n), groups)
        and of_x
        and of_x[-1] == groups
        and x_scale.numel() == tokens * groups
    ):
        return BLOCK
    raise ValueError(
        f"linear_fp8: x {tuple(x.shape)} and weight {tuple(weight.shape)} with scales {of_x} and {of_weight}: x_scale"
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
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_fp8: x {tuple(x.shape)} must be [..., K] and weight {tuple(weight.shape)} [N, K]"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"linear_fp8: bias {tuple(bias.shape)} must be [{weight.shape[0]}]")
    return granularity(x, weight, x_scale, weight_scale)


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
