"""FlashAttention-3 as a provider of mla_decode: rotary parts are its queries and keys, latents its q_v and values."""

from __future__ import annotations

import torch

from fastkernels.overrides.attention import fa3
from fastkernels.overrides.latent_attention import mla_cases

_starts: dict[tuple[int, torch.device], torch.Tensor] = {}


def supports(
    q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_k: int,
    scale: float, head_size_v: int, k_scale: float = 1.0,
) -> str | None:  # fmt: skip
    """Return why FlashAttention-3 does not compute this call of mla_decode, None if it does."""
    if (q.shape[-1], head_size_v) != (576, 512):
        return f"FlashAttention-3 has a kernel for 512 + 64 channels, got {head_size_v} + {q.shape[-1] - head_size_v}"
    if k_scale != 1.0:
        return f"FlashAttention-3 is used without a scale of the cache, got {k_scale}"
    if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32:
        return f"seq_lens are {seq_lens.dtype} and the block table is {block_table.dtype}, not int32"
    if any(
        t.stride(-1) != 1 or t.data_ptr() % 16 or any(s % 8 for s in t.stride()[:-1]) for t in (q, kv_cache)
    ):
        return f"strides {tuple(q.stride())} and {tuple(kv_cache.stride())}: rows must be contiguous, from 16 bytes on"
    if q.shape[1] > 64 and kv_cache.shape[1] % 64 == 0:
        return f"FlashAttention-3 multiplies free slots of a block with 0, which can be NaN, for {q.shape[1]} heads"
    key = kv_cache[..., head_size_v:].unsqueeze(2)
    return fa3.supports(q[..., head_size_v:], key, key)


def decode(
    q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_k: int,
    scale: float, head_size_v: int, k_scale: float = 1.0, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run FlashAttention-3 with the arguments of mla_decode.reference. It makes its schedule in each call."""
    mla_cases.check("mla_decode", q, kv_cache, head_size_v)
    out = mla_cases.memory("mla_decode", q, head_size_v, out)
    if out.numel() == 0:
        return out
    (latent, rope), keys = q.split([head_size_v, q.shape[2] - head_size_v], dim=-1), kv_cache.unsqueeze(2)
    key, value, starts = keys[..., head_size_v:], keys[..., :head_size_v], _query_starts(len(q), q.device)
    entry, is_vllm = fa3.entry_point()
    if is_vllm:
        entry(
            rope, key, value, 1, starts, max_seqlen_k, seqused_k=seq_lens, q_v=latent, softmax_scale=scale, causal=True,
            block_table=block_table, out=out, fa_version=3,
        )  # fmt: skip
        return out
    return out.copy_(
        entry(
            rope, key, value, qv=latent, cache_seqlens=seq_lens, page_table=block_table, cu_seqlens_q=starts,
            max_seqlen_q=1, softmax_scale=scale, causal=True,
        )
    )  # fmt: skip


def _query_starts(batch: int, device: torch.device) -> torch.Tensor:
    found = _starts.get((batch, device))
    if found is None:
        found = torch.arange(batch + 1, dtype=torch.int32, device=device)
        if not torch.cuda.is_current_stream_capturing():  # a graph's memory is its own
            _starts[batch, device] = found
    return found
