"""Baselines of latent attention: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

from fastkernels.core.baseline import Baseline, Function, dense, filled, first, half, same
from fastkernels.overrides.attention import flashinfer
from fastkernels.overrides.attention.production import decode_starts
from fastkernels.overrides.kit.libraries import T, from_flashinfer


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
    if (q.shape[2], head_size_v) != (576, 512):
        return f"FlashMLA has a kernel for 512 + 64 channels only, got {head_size_v} + {q.shape[2] - head_size_v}"
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
    if (q.shape[2], head_size_v) != (576, 512):
        return f"FlashInfer has a kernel for 512 + 64 channels only, got {head_size_v} + {q.shape[2] - head_size_v}"
    if any(scale != 1.0 for scale in k_scale):
        return "FlashInfer is used without a scale of the cache"
    return first(half(q), same(q, kv_cache), dense(q, kv_cache), filled(q))


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "mla_decode": (
        Baseline("flashmla", "host", _flashmla, ("vllm",), refuses=_no_flashmla),
        from_flashinfer(_flashinfer_mla_decode, _no_flashinfer_mla, graph=False),
    ),
    "mla_prefill": (from_flashinfer(lambda: flashinfer.latent_prefill, _no_flashinfer_mla, graph=False),),
}
