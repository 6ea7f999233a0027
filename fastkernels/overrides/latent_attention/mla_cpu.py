"""Multi-head latent attention on the CPU: matrix products over each sequence's own latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastkernels.overrides.attention.paged_cache import take_blocks
from fastkernels.overrides.kit.softmax import weights_of

MOST_SCORES = 1 << 24  # in memory at a time


def attend_rows(
    q: torch.Tensor, kv_cache: torch.Tensor, starts: Sequence[int], lens: Sequence[int], block_table: torch.Tensor,
    scale: float, head_size_v: int, k_scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attend with the queries starts[i] .. starts[i + 1] of each sequence of lens[i] keys; see mla_prefill.

    In at least float32: the softmax of large scores would magnify their rounding to q's dtype.
    """
    heads, block_size, acc = q.shape[1], kv_cache.shape[1], torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:2], head_size_v)
    for i, n_keys in enumerate(lens):
        n = starts[i + 1] - starts[i]
        if n == 0 or n_keys == 0:
            continue
        keys = take_blocks(kv_cache, block_table[i, : -(-n_keys // block_size)].long()).flatten(0, 1)[:n_keys]
        keys = keys.to(acc)
        at_once = max(1, MOST_SCORES // (heads * n_keys))
        for first in range(0, n, at_once):
            count = min(at_once, n - first)
            rows = slice(starts[i] + first, starts[i] + first + count)
            scores = (
                (q[rows].flatten(0, 1).to(acc) @ keys.t()).view(count, heads, n_keys).mul_(scale * k_scale)
            )
            if n > 1 or n_keys < n:
                last = torch.arange(n_keys - n + first, n_keys - n + first + count)
                scores.masked_fill_((torch.arange(n_keys) > last[:, None])[:, None], float("-inf"))
            weights = weights_of(scores)
            out[rows] = (weights.flatten(0, 1) @ keys[:, :head_size_v]).view(count, heads, -1) * k_scale
    return out
