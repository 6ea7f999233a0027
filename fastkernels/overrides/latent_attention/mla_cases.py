"""Axes, checks and case sizes that the ops of multi-head latent attention share; see cases.

latent  channels of a token's compressed keys and values; rope: channels of its rotary key
"""

from __future__ import annotations

import random
from typing import Any

import torch

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Scalar, Tensor
from fastkernels.core.expressions import Expr
from fastkernels.core.shapes import near, near_size
from fastkernels.overrides.attention import cases

DEEPSEEK: dict[str, Any] = {
    "heads": 128,
    "latent": 512,
    "rope": 64,
    "block_size": 64,
}  # V2 and V3, before sharding
SMALL: dict[str, Any] = {"heads": 3, "latent": 48, "rope": 16, "block_size": 16}

CACHE = Tensor(
    "kv_cache", "blocks block_size latent+rope", bytes="keys_read * (latent + rope) * itemsize(dtype)"
)
SCALARS = (Scalar("scale"), Scalar("head_size_v", "latent"), Scalar("k_scale", default=1.0))
FLOPS = "2 * pairs * heads * (2 * latent + rope)"
EXTREMES = {"huge_key": cases.huge_key, "equal_keys": cases.equal_keys}

AXES: dict[str, Axis] = {
    **{name: axis for name, axis in cases.AXES.items() if name not in ("kv_heads", "head_size", "scales")},
    "latent": Axis.width(),
    "rope": Axis.width(),
    "scale": Axis(Expr("(latent + rope) ** -0.5")),
}


def check(name: str, q: torch.Tensor, kv_cache: torch.Tensor, head_size_v: int) -> None:
    """Raise ValueError if q [T, H, R + P], the cache [blocks, block_size, R + P] and R do not match."""
    if q.dim() != 3 or kv_cache.dim() != 3 or q.shape[2] != kv_cache.shape[2]:
        raise ValueError(
            f"{name}: q must be [T, H, R + P] and kv_cache [blocks, block_size, R + P], got {tuple(q.shape)} and"
            f" {tuple(kv_cache.shape)}"
        )
    if not 0 < head_size_v <= q.shape[2]:
        raise ValueError(
            f"{name}: head_size_v {head_size_v} is not in 1 .. {q.shape[2]}, the channels of a key"
        )


def memory(name: str, q: torch.Tensor, head_size_v: int, out: torch.Tensor | None) -> torch.Tensor:
    """Return `out`, or new memory [T, H, head_size_v]. Raises ValueError if `out` cannot hold the result."""
    shape = (*q.shape[:2], head_size_v)
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    if out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"{name}: out must be contiguous {shape} {q.dtype}, got {tuple(out.shape)} {out.dtype} with strides"
            f" {out.stride()}"
        )
    return out


def draw_batch(case: Case, rng: random.Random) -> dict[str, Any]:
    """Draw other sequences, heads and channels with about as many keys in all; see cases.draw_batch."""
    d = case.dims
    like = Case(case.name, {**d, "kv_heads": d["heads"], "head_size": d["latent"]}, case.dtype)
    drawn = cases.draw_batch(like, rng)
    more = {
        "heads": near(d["heads"], rng), "latent": near_size(d["latent"], rng), "rope": near_size(d["rope"], rng),
    }  # fmt: skip
    return {**{name: n for name, n in drawn.items() if name not in ("kv_heads", "head_size")}, **more}
