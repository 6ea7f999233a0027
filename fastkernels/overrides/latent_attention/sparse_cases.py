"""Axes and helpers that the ops of sparse latent attention (DSA) share; see cases of attention and mla_cases.

topk  keys that a query attends to; index_heads, index_size: the heads of the indexer, and channels of an index key
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from fastkernels.core.case import Case
from fastkernels.overrides.attention import cases


def sequence_of(cu_seqlens_q: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the sequence of each token, [T] int64; B for tokens past cu_seqlens_q[B] (padding)."""
    at = torch.arange(tokens, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    # Not of cu_seqlens_q[1:]: Inductor 2.11 searches views from their storage's first value on.
    return torch.searchsorted(cu_seqlens_q, at, right=True) - 1


def seen_by(d: Mapping[str, Any]) -> list[int]:
    """Count the keys that the causal mask lets each query of a case see."""
    return [max(k - n + 1 + i, 0) for n, k in cases.lengths(d) for i in range(n)]


def chosen(d: Mapping[str, Any]) -> int:
    """Count the keys that the queries of a case attend to, at most topk each."""
    total = 0
    for n, k in cases.lengths(d):
        first, most = max(k - n + 1, 0), min(k, d["topk"])
        total += (first + most) * (most - first + 1) // 2 if first <= most else 0
        total += most * (k - max(most, first - 1))
    return total


def draw_batch(case: Case, rng: random.Random) -> dict[str, Any]:
    """Draw other sequences with about as many keys in all; see cases.draw_batch."""
    like = Case(case.name, {**case.dims, "heads": 1, "kv_heads": 1, "head_size": 64}, case.dtype)
    drawn = cases.draw_batch(like, rng)
    return {name: n for name, n in drawn.items() if name not in ("heads", "kv_heads", "head_size")}
