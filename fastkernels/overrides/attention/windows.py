"""Cosine attention within windows, with a learned position bias: SwinV2 (arXiv 2111.09883)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fastkernels.overrides.attention.attention_dense import attend


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


def attend_in_windows(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], logit_scale: torch.Tensor, rows: torch.Tensor,
    index: torch.Tensor, mask: torch.Tensor | None, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """Attend with queries and keys of length 1: qkv each [B * windows, N, H, D]; returns [B * windows, N, H * D].

    logit_scale: [H, 1, 1]. rows: [R, H], of which index [N, N] names the bias of each pair of tokens. mask:
    [windows, N, N], added to the scores, or None. dropout: of the weights, in training.
    """
    q, k, v = qkv
    scale = torch.clamp(logit_scale, max=math.log(100.0)).exp().to(q.dtype)
    q = F.normalize(q, dim=-1) * scale.view(-1, 1)
    bias = rows[index.flatten()].view(*index.shape, -1).permute(2, 0, 1)
    bias = 16 * torch.sigmoid(bias)[None]
    if mask is not None:
        bias = (bias + mask[:, None]).repeat(len(q) // len(mask), 1, 1, 1)
    return attend(q, F.normalize(k, dim=-1), v, 1.0, bias.to(q.dtype), dropout)
