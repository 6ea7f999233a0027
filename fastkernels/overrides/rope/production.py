"""Baselines of rotary embeddings: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, Function, filled, first, half, inductor, same
from fastkernels.overrides.cache.production import no_vllm_store, vllm_store_kvcache
from fastkernels.overrides.kit.libraries import (
    T,
    from_flashinfer,
    from_sglang,
    from_torch,
    from_vllm,
    vllm_ops,
)
from fastkernels.overrides.rope import rope_nd


def _vllm_rotary_emb() -> Function:
    c = vllm_ops()

    def rotary_emb(
        positions: T, query: T, key: T | None, head_size: int, cache: T, neox: bool, *_: Any
    ) -> None:
        c.rotary_embedding(positions, query, key, head_size, cache, neox)

    return rotary_emb


def _no_rotary(
    positions: T, query: T, key: T | None, head_size: int, cache: T, neox: bool, cast_cache: bool = True,
    round_products: bool = False,
) -> str | None:  # fmt: skip
    if round_products:
        return "vLLM's kernel rounds only the sum of the products"
    return first(same(query, key, cache), filled(query))


def _rope_store() -> Function:
    rope, store = _vllm_rotary_emb(), vllm_store_kvcache()

    def rope_store_kvcache(
        positions: T, query: T, key: T, value: T, key_cache: T, value_cache: T, slots: T, table: T, neox: bool,
        q_weight: T | None = None, k_weight: T | None = None, eps: float = 1e-6, k_scale: float = 1.0,
        v_scale: float = 1.0, *_: Any,
    ) -> None:  # fmt: skip
        rope(positions, query, key, query.shape[-1], table, neox)
        store(key, value, key_cache, value_cache, slots, k_scale, v_scale)

    return rope_store_kvcache


def _no_rope_store(
    positions: T, query: T, key: T, value: T, key_cache: T, value_cache: T, slots: T, table: T, neox: bool,
    q_weight: T | None = None, k_weight: T | None = None, eps: float = 1e-6, k_scale: float = 1.0,
    v_scale: float = 1.0, offset: float = 0.0, norm_value: bool = False,
) -> str | None:  # fmt: skip
    if q_weight is not None or norm_value:
        return "vLLM has no such kernel: its norms are separate, and Inductor fuses them with other ops"
    rope = _no_rotary(positions, query, key, query.shape[-1], table, neox)
    return first(rope, no_vllm_store(key, value, key_cache, value_cache, slots, k_scale, v_scale))


def _sglang_rotary_emb() -> Function:
    from sglang.jit_kernel.rope import apply_rope_with_cos_sin_cache_inplace

    def rotary_emb(positions: T, query: T, key: T, head_size: int, cache: T, neox: bool, *_: Any) -> None:
        width = cache.shape[-1]
        q, k = (t.view(t.shape[0], -1, head_size)[..., :width] for t in (query, key))
        apply_rope_with_cos_sin_cache_inplace(q, k, cache, positions, is_neox=neox)

    return rotary_emb


def _flashinfer_rotary_emb() -> Function:
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    def rotary_emb(positions: T, query: T, key: T, head_size: int, cache: T, neox: bool, *_: Any) -> None:
        apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cache, neox)

    return rotary_emb


def no_rotary(
    positions: T, query: T, key: T | None, head_size: int, cache: T, neox: bool, cast_cache: bool = True,
    round_products: bool = False,
) -> str | None:  # fmt: skip
    if key is None or round_products:
        return "needs a key, and rounds only the sum of the products"
    if cache.dtype != torch.float32:
        return f"needs cosines and sines in float32, got {cache.dtype}"
    if query.dim() != 2 or head_size not in (64, 128, 256):
        return f"takes [T, heads * head_size] with heads of 64, 128 or 256, got {tuple(query.shape)} and {head_size}"
    return first(half(query, key), filled(query))


def _qk_norm_rope(
    x: T, weight: T | None, cos: T, sin: T, eps: float, text: T | None = None, text_weight: T | None = None
) -> T:  # fmt: skip
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    if text is not None:
        y = torch.cat((F.rms_norm(text, x.shape[-1:], text_weight, eps), y), dim=1)
    real, imaginary = y.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-imaginary, real), dim=-1).flatten(3)
    return (y.float() * cos[None, :, None] + turned.float() * sin[None, :, None]).to(x.dtype)


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "rope_nd": (*from_torch(rope_nd.reference), inductor("rope_nd")),
    "rope_store_kvcache": (from_vllm(_rope_store, _no_rope_store, overwrites=(2,)),),
    "rotary_emb": (
        from_vllm(_vllm_rotary_emb, _no_rotary),
        from_sglang(_sglang_rotary_emb, no_rotary),
        from_flashinfer(_flashinfer_rotary_emb, no_rotary),
        inductor("rotary_emb"),
    ),
    "qk_norm_rope": (*from_torch(_qk_norm_rope), inductor("qk_norm_rope")),
}
