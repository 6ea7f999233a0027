"""One step over a paged KV cache, for the SPECs of the modules that store keys and values and then attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.core.spec import Case
from fastkernels.overrides.attention import attention_calls as calls
from fastkernels.overrides.attention import attention_prefill
from fastkernels.overrides.cache import store_kvcache


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    padded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query: [T, Hq, D]; key, value: [T, Hkv, D]; the rest as in store_kvcache and attention_prefill.

    Returns (out [T, Hq, D], new key_cache, new value_cache).
    """
    caches = store_kvcache.reference(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    out = attention_prefill.reference(
        query, *caches, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k, scale, window_left, softcap,
        k_scale, v_scale, padded,
    )  # fmt: skip
    return out, *caches


def make_step(
    case: Case, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """query [T, Hq, D], positions [T], and the step: key_cache, value_cache, slot_mapping, cu_seqlens_q, seq_lens,
    block_table, max_seqlen_q, max_seqlen_k; for dims as in attention_prefill.
    """
    d = case.dims
    q, key_cache, value_cache, seq_lens, table = calls.make_batch(case, device, generator)
    block_size, q_lens, lens = key_cache.shape[1], d["q_lens"], d["seq_lens"]
    starts = torch.tensor([0, *q_lens], device=device).cumsum(0).to(torch.int32)
    positions = [torch.arange(k - n, k, device=device) for n, k in zip(q_lens, lens, strict=True)]
    slots = [
        table[i].long()[at // block_size] * block_size + at % block_size for i, at in enumerate(positions)
    ]
    nowhere = torch.full((d.get("padding", 0),), -1, device=device)
    longest = [d.get(f"max_seqlen_{k}", max(v, default=0)) for k, v in (("q", q_lens), ("k", lens))]
    step = [key_cache, value_cache, torch.cat((*slots, nowhere)), starts, seq_lens, table, *longest]
    return q, torch.cat((*positions, nowhere.clamp_min(0))), step


def step_dims(heads: int, dtype: torch.dtype, step: Sequence[Any], tokens: int) -> dict[str, Any]:
    """The dims that make_step reads, of a step of so many query heads and tokens."""
    key_cache, _, _, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k = step
    q_lens = cu_seqlens_q.diff().tolist()
    found = calls.cache_dims(heads, dtype, key_cache, seq_lens, block_table)
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    padding = {"padding": tokens - sum(q_lens)} if tokens > sum(q_lens) else {}
    return {"q_lens": q_lens, **found, **longest, **padding}


def stored_bytes(case: Case) -> int:
    """What storing the step's keys and values reads and writes."""
    d, size = case.dims, getattr(torch, case.dtype).itemsize
    return 2 * sum(d["q_lens"]) * d["kv_heads"] * d["head_size"] * (size + max(size, 2))


def metadata(step: Sequence[Any], padded: bool = True) -> AttentionMetadata:
    _, _, slots, starts, seq_lens, table, max_q, max_k = step
    return AttentionMetadata(slots, starts, seq_lens, table, max_q, max_k, padded=padded)
