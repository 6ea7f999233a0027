"""Queries, keys and values of timm's attention layers, of which one kernel computes the products and the rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.linear.modules import changed, stacked_products
from fastkernels.overrides.rope.linear_rope import rotated_products
from fastkernels.overrides.rope.rope_nd import rope_nd


def in_one_kernel(
    module: Any, x: torch.Tensor, rope: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Queries, keys and values [B, N, H, D] of an Attention, AttentionRope or EvaAttention, ours or the host's.

    The first two are normalized or rotated. None if layers are not plain or differ, or have biases elsewhere, or if
    rotation follows norms or differs between images and heads.
    """
    packed = module.qkv is not None
    if (packed and getattr(module, "q_bias", None) is not None) or not _turns(module, x, rope):
        return None
    layers = (module.qkv,) if packed else (module.q_proj, module.k_proj, module.v_proj)
    found, halves = None, getattr(module, "rotate_half", False)
    if rope is not None:
        sin, cos = rope.chunk(2, dim=-1)
        found = rotated_products(layers, x, cos, sin, halves)
    turned = found is not None
    found = stacked_products(layers, x) if found is None else found
    if found is None:
        return None
    of = 2 if packed else 0
    heads = (
        found[0].unflatten(-1, (3, -1, module.head_dim))
        if packed
        else found.unflatten(-1, (-1, module.head_dim))
    )
    q, k, v = heads.unbind(of)
    if rope is not None and not turned:
        both = rope_nd(heads.narrow(of, 0, 2).flatten(of, of + 1), cos, sin, halves)
        q, k = both.unflatten(of, (2, -1)).unbind(of)
    return module.q_norm(q), module.k_norm(k), v


def _turns(module: Any, x: torch.Tensor, rope: torch.Tensor | None) -> bool:
    """Whether there is no rotation, or one of queries and keys as they are, with a row for each token but a prefix."""
    if rope is None:
        return True
    plain = all(
        isinstance(norm, nn.Identity) and not changed(norm) for norm in (module.q_norm, module.k_norm)
    )
    return plain and rope.dim() == 2 and x.shape[1] - len(rope) == module.num_prefix_tokens
