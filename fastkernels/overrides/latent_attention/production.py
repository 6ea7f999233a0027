"""Baselines of latent attention: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.baseline import Baseline, Function, dense, filled, first, half, same
from fastkernels.overrides.attention import flashinfer
from fastkernels.overrides.attention.production import decode_starts
from fastkernels.overrides.kit.libraries import T, from_flashinfer, from_vllm, vllm_ops

FLASHMLA_HEADS = 64  # of its sparse kernel on Hopper, a multiple


def _other_channels(library: str, q: T, head_size_v: int) -> str | None:
    if (q.shape[2], head_size_v) == (576, 512):
        return None
    return (
        f"{library} has a kernel for 512 + 64 channels only, got {head_size_v} + {q.shape[2] - head_size_v}"
    )


def _fa3() -> Function:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def mla_decode(
        q: T, kv_cache: T, seq_lens: T, block_table: T, longest: int, scale: float, head_size_v: int, *_: Any
    ) -> T:
        # vLLM makes the schedule once per step for all layers; here it is part of each call. Its CUDA graphs have up to
        # 32 splits.
        return flash_attn_varlen_func(
            q[..., head_size_v:], kv_cache[..., head_size_v:].unsqueeze(-2), kv_cache[..., :head_size_v].unsqueeze(-2),
            1, decode_starts(len(q), q.device), longest, seqused_k=seq_lens, q_v=q[..., :head_size_v],
            softmax_scale=scale, causal=True, block_table=block_table, num_splits=32, fa_version=3,
        )  # fmt: skip

    return mla_decode


def _no_fa3(
    q: T, kv_cache: T, seq_lens: T, block_table: T, longest: int, scale: float, head_size_v: int, k_scale: float = 1.0
) -> str | None:  # fmt: skip
    if (reason := _other_channels("FlashAttention-3", q, head_size_v)) is not None:
        return reason
    if kv_cache.shape[1] % 16:
        return f"FlashAttention-3 needs blocks of a multiple of 16 tokens, got {kv_cache.shape[1]}"
    if k_scale != 1.0 or bool((seq_lens == 0).any()):
        return "FlashAttention-3 is used without a scale of the cache and without empty sequences"
    return first(half(q), same(q, kv_cache), dense(q, kv_cache, block_table), filled(q))


def _flashmla() -> Function:
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    def mla_decode(
        q: T, kv_cache: T, seq_lens: T, block_table: T, longest: int, scale: float, head_size_v: int, *_: Any
    ) -> T:
        # vLLM makes the schedule once per step for all layers; here it is part of each call.
        schedule, splits = get_mla_metadata(seq_lens, q.shape[1], 1)
        out, _lse = flash_mla_with_kvcache(
            q=q.unsqueeze(1), k_cache=kv_cache.unsqueeze(-2), block_table=block_table, cache_seqlens=seq_lens,
            head_dim_v=head_size_v, tile_scheduler_metadata=schedule, num_splits=splits, softmax_scale=scale,
            causal=True,
        )  # fmt: skip
        return out.squeeze(1)

    return mla_decode


def _no_flashmla(
    q: T, kv_cache: T, seq_lens: T, block_table: T, longest: int, scale: float, head_size_v: int, k_scale: float = 1.0
) -> str | None:  # fmt: skip
    if (reason := _other_channels("FlashMLA", q, head_size_v)) is not None:
        return reason
    if kv_cache.shape[1] != 64:
        return f"FlashMLA needs blocks of 64 tokens, got {kv_cache.shape[1]}"
    if k_scale != 1.0 or bool((seq_lens == 0).any()):
        return "FlashMLA is used without a scale of the cache and without empty sequences"
    return first(half(q), same(q, kv_cache), dense(q, kv_cache, block_table), filled(q))


def _flashinfer_mla_decode() -> Function:
    def mla_decode(q: T, kv_cache: T, seq_lens: T, block_table: T, longest: int, *rest: Any) -> T:
        starts = decode_starts(q.shape[0], q.device)
        return flashinfer.latent_prefill(q, kv_cache, starts, seq_lens, block_table, 1, longest, *rest)

    return mla_decode


def _no_flashinfer_mla(q: T, kv_cache: T, *rest: Any) -> str | None:
    head_size_v, k_scale = (rest[4], rest[5:]) if len(rest) < 7 else (rest[6], rest[7:])
    if (reason := _other_channels("FlashInfer", q, head_size_v)) is not None:
        return reason
    if any(scale != 1.0 for scale in k_scale):
        return "FlashInfer is used without a scale of the cache"
    return first(half(q), same(q, kv_cache), dense(q, kv_cache), filled(q))


def _flashmla_sparse() -> Function:
    from vllm.v1.attention.backends.mla.sparse_utils import (
        triton_convert_req_index_to_global_index as to_slots,
    )
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    def mla_sparse(
        q: T, kv_cache: T, indices: T, cu_seqlens_q: T, seq_lens: T, block_table: T, longest: int, scale: float, *_: Any
    ) -> T:  # fmt: skip
        (tokens, heads, size), batch = q.shape, len(block_table)
        if longest == 1 and batch == tokens:
            row = decode_starts(tokens, q.device)[:-1]
        else:  # vLLM has it from the host, once per step for all layers
            row = torch.repeat_interleave(
                decode_starts(batch, q.device)[:-1], cu_seqlens_q.diff(), output_size=tokens
            )
        slots, counts = to_slots(
            row, block_table, indices, BLOCK_SIZE=kv_cache.shape[1], NUM_TOPK_TOKENS=indices.shape[1],
            return_valid_counts=True,
        )  # fmt: skip
        if heads % FLASHMLA_HEADS:
            padded = q.new_empty(tokens, FLASHMLA_HEADS, size)
            padded[:, :heads] = q
            q = padded
        keys = kv_cache.view(-1, 1, size)
        return flash_mla_sparse_fwd(q, keys, slots.unsqueeze(1), scale, topk_length=counts)[0][:, :heads]

    return mla_sparse


def _no_flashmla_sparse(
    q: T, kv_cache: T, indices: T, cu_seqlens_q: T, seq_lens: T, block_table: T, longest: int, scale: float,
    head_size_v: int, k_scale: float = 1.0,
) -> str | None:  # fmt: skip
    if (q.shape[2], head_size_v) != (576, 512) or q.dtype != torch.bfloat16:
        return f"FlashMLA has a kernel for 512 + 64 channels in bfloat16 only, got {q.shape[2]} in {q.dtype}"
    if q.shape[1] % FLASHMLA_HEADS and FLASHMLA_HEADS % q.shape[1]:
        return f"FlashMLA needs a multiple or a divisor of {FLASHMLA_HEADS} heads, got {q.shape[1]}"
    if indices.shape[1] % 128:
        return f"vLLM needs a multiple of 128 chosen keys, got {indices.shape[1]}"
    if k_scale != 1.0 or int(cu_seqlens_q[-1]) != len(q) or bool((indices < 0).all(dim=1).any()):
        return "FlashMLA is used without a scale of the cache, padding, and queries without keys"
    return first(same(q, kv_cache), dense(q, kv_cache, indices, block_table), filled(q))


def _vllm_top_k_per_row() -> Function:
    top_k_per_row_prefill = vllm_ops().top_k_per_row_prefill

    def top_k_per_row(logits: T, topk: int, row_ends: T | None = None) -> T:
        (tokens, n), device = logits.shape, logits.device
        starts = torch.zeros(tokens, dtype=torch.int32, device=device)
        ends = torch.full((tokens,), n, dtype=torch.int32, device=device) if row_ends is None else row_ends
        out = torch.empty(tokens, topk, dtype=torch.int32, device=device)
        top_k_per_row_prefill(logits, starts, ends, out, tokens, *logits.stride(), topk)
        return out

    return top_k_per_row


def _no_vllm_top_k(logits: T, topk: int, row_ends: T | None = None) -> str | None:
    if logits.dtype != torch.float32 or topk > 2048:
        return f"vLLM selects up to 2048 of float32, got {topk} of {logits.dtype}"
    return first(dense(logits, row_ends), filled(logits))


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "mla_decode": (
        # vLLM's default on Hopper, FLASH_ATTN_MLA
        Baseline("fa3", "host", _fa3, ("vllm.vllm_flash_attn",), refuses=_no_fa3),
        Baseline("flashmla", "host", _flashmla, ("vllm",), refuses=_no_flashmla),
        from_flashinfer(_flashinfer_mla_decode, _no_flashinfer_mla, graph=False),
    ),
    "mla_prefill": (from_flashinfer(lambda: flashinfer.latent_prefill, _no_flashinfer_mla, graph=False),),
    "mla_sparse": (Baseline("flashmla", "host", _flashmla_sparse, ("vllm",), refuses=_no_flashmla_sparse),),
    "top_k_per_row": (
        from_vllm(
            _vllm_top_k_per_row, _no_vllm_top_k, differs="its positions are in no order", unchecked=(0,)
        ),
    ),
}
