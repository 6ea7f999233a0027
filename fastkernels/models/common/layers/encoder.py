"""Parts that encoders share: attention within sequences, and sizes that configs may give as pairs."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.forward_context import AttentionMetadata, get_forward_context
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.overrides.dense_attention.attention_dense import attention_dense


def size_of(config: Any, name: str) -> int:
    """A field that config.json may give as a pair, but that must be one integer here. Raises Unsupported."""
    value = getattr(config, name)
    if type(value) is not int or value < 1:
        raise Unsupported(f"config.{name}={value!r} is not supported, only one integer above 0")
    return value


def attend_within(qkv: torch.Tensor) -> torch.Tensor:
    """Non-causal attention within each sequence of the forward context: [T, 3, heads, D] to [T, heads, D]."""
    metadata = get_forward_context()
    if metadata.key_rows is not None:
        return _attend_to_seen(qkv, metadata, metadata.key_rows)
    rows, longest, scale = len(metadata.seq_lens), metadata.max_seqlen_q, qkv.shape[-1] ** -0.5
    if rows * longest == len(
        qkv
    ):  # all of one length: more providers support a batch than concatenated sequences
        q, k, v = qkv.view(rows, longest, *qkv.shape[1:]).unbind(2)
        return attention_dense(q, k, v, scale).flatten(0, 1)
    q, k, v = qkv[None].unbind(2)
    starts = metadata.cu_seqlens_q
    return attention_dense(q, k, v, scale, None, starts, starts, longest, longest)[0]


def _attend_to_seen(qkv: torch.Tensor, metadata: AttentionMetadata, key_rows: torch.Tensor) -> torch.Tensor:
    """attend_within, to the keys and values in key_rows only."""
    q, k, v = qkv.unbind(1)
    k, v = (t.index_select(0, key_rows) for t in (k, v))
    starts = torch.zeros_like(metadata.cu_seqlens_q)
    starts[1:] = metadata.seq_lens.cumsum(0)
    return attention_dense(
        q[None], k[None], v[None], q.shape[-1] ** -0.5, None, metadata.cu_seqlens_q, starts, metadata.max_seqlen_q,
        metadata.max_seqlen_k,
    )[0]  # fmt: skip


def attend_from_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Attention of one query [1, heads, D] to each of B sequences, k and v [T, heads, D]; returns [B, heads * D]."""
    rows, scale, longest = len(starts) - 1, q.shape[-1] ** -0.5, get_forward_context().max_seqlen_q
    q = q.expand(rows, -1, -1)
    if rows * longest == len(k):
        k, v = (t.reshape(rows, longest, *t.shape[1:]) for t in (k, v))
        return attention_dense(q[:, None], k, v, scale).flatten(1)
    each = torch.arange(rows + 1, dtype=torch.int32, device=k.device)
    pooled = attention_dense(
        q[None].contiguous(), k[None], v[None], scale, None, each, starts.int(), 1, longest
    )
    return pooled[0].flatten(1)
