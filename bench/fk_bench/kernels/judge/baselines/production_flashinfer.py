"""FlashInfer's kernels (0.6) under our ops' calling conventions. It compiles with nvcc at the first call of a kind."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.overrides.attention import flashinfer as _flashinfer
from fk_bench.kernels.judge.baselines.baselines import (
    Baseline,
    Function,
    aligned,
    dense,
    filled,
    first,
    half,
    same,
)

T = torch.Tensor


def _flash(make: Any, refuses: Any = None, **fields: Any) -> Baseline:
    return Baseline("flashinfer", "library", make, modules=("flashinfer",), refuses=refuses, **fields)


def _rms_norm(plain: str, fused: str) -> Any:
    def make() -> Function:
        import flashinfer.norm as norm

        alone, add = getattr(norm, plain), getattr(norm, fused)

        def rms_norm(x: T, weight: T, eps: float, residual: T | None = None, *_: Any) -> T:
            if residual is not None:
                add(x, residual, weight, eps)
                return x
            return alone(x.view(-1, x.shape[-1]), weight, eps).view(x.shape)

        return rms_norm

    return make


def no_rms_norm(
    x: T, weight: T | None, eps: float, residual: T | None = None, var_hidden_size: int | None = None, *_: Any
) -> str | None:
    if weight is None or var_hidden_size is not None:
        return "needs a weight, and the variance of all channels"
    if residual is not None and x.dim() != 2:
        return f"its fused norm takes two dimensions, got {x.dim()}"
    return first(half(x, weight, residual), same(x, weight, residual), dense(x, weight, residual), filled(x))


def _layer_norm() -> Function:
    from flashinfer.norm import layernorm

    def layer_norm(x: T, weight: T, bias: T, eps: float) -> T:
        return layernorm(x.view(-1, x.shape[-1]), weight, bias, eps).view(x.shape)

    return layer_norm


def _no_layer_norm(x: T, weight: T | None, bias: T | None, eps: float) -> str | None:
    wide = all(t is not None and t.dtype == torch.float32 for t in (weight, bias))
    if not wide or x.dtype != torch.bfloat16:
        return "takes bfloat16 with parameters in float32"
    return first(dense(x), filled(x))


def _act_and_mul(name: str, other: str = "") -> Any:
    def make() -> Function:
        import flashinfer.activation as activation

        plain, tanh = getattr(activation, name), getattr(activation, other or name)

        def act_and_mul(x: T, approximate: str = "none") -> T:
            return (tanh if approximate == "tanh" else plain)(x)

        return act_and_mul

    return make


def _no_act(x: T, *_: Any) -> str | None:
    return first(half(x), dense(x), filled(x), aligned(x, 32))


def _rotary_emb() -> Function:
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    def rotary_emb(positions: T, query: T, key: T, head_size: int, cache: T, neox: bool, *_: Any) -> None:
        apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cache, neox)

    return rotary_emb


def no_rotary(
    positions: T, query: T, key: T | None, head_size: int, cache: T, neox: bool, cast_cache: bool = True,
    round_products: bool = False,
) -> str | None:  # fmt: skip
    if key is None or round_products:
        return "needs a key, and rounds the sum of the products only"
    if cache.dtype != torch.float32:
        return f"needs cosines and sines in float32, got {cache.dtype}"
    if query.dim() != 2 or head_size not in (64, 128, 256):
        return f"takes [T, heads * head_size] with heads of 64, 128 or 256, got {tuple(query.shape)} and {head_size}"
    return first(half(query, key), filled(query))


def _decode() -> Function:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache as xqa

    def attention_decode(
        q: T, key_cache: T, value_cache: T, seq_lens: T, block_table: T, longest: int, scale: float,
        window_left: int = -1, *_: Any,
    ) -> T:  # fmt: skip
        return xqa(
            q, (key_cache, value_cache), _flashinfer._workspace(q.device, "decode"), block_table, seq_lens, longest,
            bmm1_scale=scale, bmm2_scale=1.0, window_left=window_left,
            out=torch.empty(q.shape, dtype=q.dtype, device=q.device), kv_layout="NHD",
        )  # fmt: skip

    return attention_decode


def _no_decode(q: T, key_cache: T, value_cache: T, seq_lens: T, block_table: T, *rest: Any) -> str | None:
    empty = "does not write rows without keys" if bool((seq_lens == 0).any()) else None
    refused = _flashinfer.supports_decode(q, key_cache, value_cache, seq_lens, block_table, *rest)
    return first(refused, dense(q, seq_lens, block_table), filled(q), empty)


def _filtered() -> Function:
    from flashinfer import sampling as kernels

    from fk_bench.kernels.judge.baselines.production_torch import Filters

    filters = Filters()

    def sampling(logits: T, temperature: T, top_k: T, top_p: T, *_: Any) -> T:
        has_k, has_p = filters(logits, temperature, top_k, top_p)[1:]
        probs = torch.softmax(logits.float().div_(temperature[:, None]), dim=-1)
        if has_k:
            return kernels.top_k_top_p_sampling_from_probs(probs, top_k, top_p, deterministic=True).long()
        if has_p:
            return kernels.top_p_sampling_from_probs(probs, top_p, deterministic=True).long()
        return kernels.sampling_from_probs(probs, deterministic=True).long()

    return sampling


def _no_filtered(logits: T, temperature: T, top_k: T, top_p: T, min_p: T, *_: Any) -> str | None:
    from fk_bench.kernels.judge.baselines.production_torch import no_sampling

    if bool((temperature <= 1e-5).any()):
        return "draws only, the hosts take the argmax of greedy rows"
    if bool((top_k <= 0).any()) and bool((top_k > 0).any()):
        return "needs a top_k in every row or in none"
    return no_sampling(logits, temperature, top_k, top_p, min_p)


_NORM = {"overwrites": (0,)}
ADAPTERS: dict[str, tuple[Baseline, ...]] = {
    "rms_norm": (_flash(_rms_norm("rmsnorm", "fused_add_rmsnorm"), no_rms_norm, **_NORM),),
    "gemma_rms_norm": (_flash(_rms_norm("gemma_rmsnorm", "gemma_fused_add_rmsnorm"), no_rms_norm, **_NORM),),
    "layer_norm": (_flash(_layer_norm, _no_layer_norm),),
    "silu_and_mul": (_flash(_act_and_mul("silu_and_mul"), _no_act),),
    "gelu_and_mul": (_flash(_act_and_mul("gelu_and_mul", "gelu_tanh_and_mul"), _no_act),),
    "rotary_emb": (_flash(_rotary_emb, no_rotary),),
    "attention_decode": (_flash(_decode, _no_decode),),
    "attention_prefill": (_flash(lambda: _flashinfer.prefill, _flashinfer.supports_prefill, graph=False),),
    "sampling": (
        _flash(_filtered, _no_filtered, differs="it draws with other noise", unchecked=(0,), graph=False),
    ),
}
