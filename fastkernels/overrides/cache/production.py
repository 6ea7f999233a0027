"""Baselines of the KV cache: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.baseline import Baseline, Function, aligned, dense, filled, first, same
from fastkernels.overrides.kit.libraries import T, from_sglang, from_vllm, vllm_ops, vllm_scale


def vllm_store_kvcache() -> Function:
    vllm_ops()
    store = torch.ops._C_cache_ops.reshape_and_cache_flash

    def store_kvcache(
        key: T, value: T, key_cache: T, value_cache: T, slots: T, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> None:
        kind = "auto"
        if key_cache.dtype == torch.float8_e4m3fn:
            kind, key_cache, value_cache = "fp8", key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        scales = vllm_scale(k_scale, key.device), vllm_scale(v_scale, key.device)
        store(key, value, key_cache, value_cache, slots, kind, *scales)

    return store_kvcache


def no_vllm_store(
    key: T, value: T, key_cache: T, value_cache: T, slots: T, k_scale: float = 1.0, v_scale: float = 1.0
) -> str | None:
    if slots.dtype != torch.int64:
        return f"vLLM's slots are int64, got {slots.dtype}"
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    if not fp8 and (k_scale, v_scale) != (1.0, 1.0):
        return "vLLM scales fp8 caches only"
    return first(None if fp8 else same(key, value, key_cache), filled(key))


def _sglang_store_kvcache() -> Function:
    from sglang.jit_kernel.kvcache import store_cache

    def store_kvcache(key: T, value: T, key_cache: T, value_cache: T, slots: T, *_: Any) -> None:
        width = key.shape[1] * key.shape[2]  # SGLang's cache has a row a slot
        store_cache(
            key.view(-1, width),
            value.view(-1, width),
            key_cache.view(-1, width),
            value_cache.view(-1, width),
            slots,
        )

    return store_kvcache


def _sglang_no_store(key: T, value: T, key_cache: T, value_cache: T, slots: T, *scales: float) -> str | None:
    if any(scale != 1.0 for scale in scales) or key.dtype != key_cache.dtype:
        return "SGLang converts keys and values before this kernel"
    if bool((slots < 0).any()):
        return "SGLang has no negative slots"
    return first(dense(key_cache, value_cache), filled(key), aligned(key.flatten(1), 4))


def _vllm_concat_and_cache_mla() -> Function:
    vllm_ops()
    store = torch.ops._C_cache_ops.concat_and_cache_mla

    def concat_and_cache_mla(kv_c: T, k_pe: T, kv_cache: T, slots: T, scale: float = 1.0) -> None:
        kind = "auto"
        if kv_cache.dtype == torch.float8_e4m3fn:
            kind, kv_cache = "fp8", kv_cache.view(torch.uint8)
        store(kv_c, k_pe, kv_cache, slots, kind, vllm_scale(scale, kv_c.device))

    return concat_and_cache_mla


def _no_vllm_concat(kv_c: T, k_pe: T, kv_cache: T, slots: T, scale: float = 1.0) -> str | None:
    if slots.dtype != torch.int64:
        return f"vLLM's slots are int64, got {slots.dtype}"
    fp8 = kv_cache.dtype == torch.float8_e4m3fn
    if not fp8 and scale != 1.0:
        return "vLLM scales fp8 caches only"
    return first(None if fp8 else same(kv_c, k_pe, kv_cache), filled(kv_c))


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "concat_and_cache_mla": (from_vllm(_vllm_concat_and_cache_mla, _no_vllm_concat),),
    "store_kvcache": (
        from_vllm(vllm_store_kvcache, no_vllm_store),
        from_sglang(_sglang_store_kvcache, _sglang_no_store),
    ),
}
