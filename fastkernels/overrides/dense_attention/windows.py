"""Cosine attention within windows, with a learned position bias: SwinV2 (arXiv 2111.09883)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fastkernels.overrides.dense_attention.window_attention import window_attention
from fastkernels.overrides.linear.modules import changed


def relative_positions(
    window_size: tuple[int, ...], pretrained_window_size: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-spaced relative coordinates [1, 2 h - 1, 2 w - 1, 2], and the row of each pair of tokens [N, N]."""
    (h, w), trained = window_size, pretrained_window_size
    most = trained if trained[0] > 0 else window_size
    steps = [torch.arange(1 - n, n, dtype=torch.float32) * 8 / max(m - 1, 1)
             for n, m in zip((h, w), most, strict=True)]  # fmt: skip
    table = torch.stack(torch.meshgrid(*steps, indexing="ij"), dim=-1)[None]
    table = table.sign() * torch.log2(table.abs() + 1) / math.log2(8)
    y, x = (t.flatten() for t in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
    index = (y[:, None] - y + h - 1) * (2 * w - 1) + x[:, None] - x + w - 1
    return table, index


def position_bias(mlp: Any, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The bias [H, N, N] of each pair of tokens, 16 sigmoid(mlp(table)); `index` [N, N] names the pair's row.

    mlp: two linear layers with ReLU between them. The first has two inputs: in compiled code, sums take less time than
    products of such matrices.
    """
    flat = table.flatten(0, -2)
    plain = [type(m) for m in mlp] == [nn.Linear, nn.ReLU, nn.Linear] and not any(map(changed, (mlp, *mlp)))
    if torch.compiler.is_compiling() and plain and type(mlp[0].weight) is type(mlp[2].weight) is nn.Parameter:
        first, last = mlp[0], mlp[2]
        hidden = flat[:, :1] * first.weight[:, 0] + flat[:, 1:] * first.weight[:, 1] + first.bias
        rows = (hidden.relu()[:, None] * last.weight).sum(-1)
    else:
        rows = mlp(flat)
    return 16 * torch.sigmoid(rows[index.flatten()].view(*index.shape, -1).permute(2, 0, 1).contiguous())


def attend_in_windows(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], logit_scale: torch.Tensor, bias: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attend with queries and keys of length 1: qkv each [B * windows, N, H, D]; returns [B * windows, N, H * D].

    logit_scale: [H, 1, 1]. bias: [H, N, N]. mask: [windows, N, N], added to the scores, or None.
    """
    return window_attention(*qkv, logit_scale.flatten(), bias, mask).flatten(2)
