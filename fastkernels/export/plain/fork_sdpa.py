"""Attention of timm's models by PyTorch's function, which the host calls, too. Never imported."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    dropout: float = 0.0, is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout, is_causal, scale=scale, enable_gqa=groups
    )
    return out.transpose(1, 2).flatten(2)
