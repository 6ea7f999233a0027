"""Attention of diffusers' models by the host's function, which chooses among its backends. Never imported."""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None
) -> torch.Tensor:
    return dispatch_attention_fn(q, k, v, attn_mask, scale=scale).flatten(2)
