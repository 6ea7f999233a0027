"""SGLang's kernels (0.5.16): those of sgl_kernel, built ahead of time, and those that it compiles at the first call."""

from __future__ import annotations

from typing import Any

import torch

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
from fk_bench.kernels.judge.baselines.production_flashinfer import no_rms_norm, no_rotary

T = torch.Tensor


def _sgl(make: Any, refuses: Any = None, **fields: Any) -> Baseline:
    return Baseline("sgl_kernel", "host", make, modules=("sgl_kernel",), refuses=refuses, **fields)


def _jit(make: Any, refuses: Any = None, **fields: Any) -> Baseline:
    return Baseline("sglang", "host", make, modules=("sglang.jit_kernel",), refuses=refuses, **fields)


def _kernels() -> Any:
    import sgl_kernel  # noqa: F401 - loads torch.ops.sgl_kernel

    return torch.ops.sgl_kernel


def _rms_norm(plain: str, fused: str) -> Any:
    """sgl_kernel's own kernels: its Python functions call FlashInfer's where that is installed."""

    def make() -> Function:
        ops = _kernels()
        alone, add = getattr(ops, plain).default, getattr(ops, fused).default

        def rms_norm(x: T, weight: T, eps: float, residual: T | None = None, *_: Any) -> T:
            if residual is not None:
                add(x, residual, weight, eps, True)
                return x
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            alone(out.view(-1, x.shape[-1]), x.view(-1, x.shape[-1]), weight, eps, True)
            return out

        return rms_norm

    return make


def _act_and_mul(name: str, other: str = "") -> Any:
    def make() -> Function:
        import sglang.jit_kernel.activation as activation

        plain, tanh = getattr(activation, name), getattr(activation, other or name)

        def act_and_mul(x: T, approximate: str = "none") -> T:
            out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
            (tanh if approximate == "tanh" else plain)(x, out)
            return out

        return act_and_mul

    return make


def _no_act(x: T, *_: Any) -> str | None:
    return first(half(x), dense(x), filled(x), aligned(x, 64))


def _relu2() -> Function:
    from sglang.jit_kernel.activation import relu2

    return lambda x: relu2(x)


def _rotary_emb() -> Function:
    from sglang.jit_kernel.rope import apply_rope_with_cos_sin_cache_inplace

    def rotary_emb(positions: T, query: T, key: T, head_size: int, cache: T, neox: bool, *_: Any) -> None:
        width = cache.shape[-1]
        q, k = (t.view(t.shape[0], -1, head_size)[..., :width] for t in (query, key))
        apply_rope_with_cos_sin_cache_inplace(q, k, cache, positions, is_neox=neox)

    return rotary_emb


def _store_kvcache() -> Function:
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


def _no_store(key: T, value: T, key_cache: T, value_cache: T, slots: T, *scales: float) -> str | None:
    if any(scale != 1.0 for scale in scales) or key.dtype != key_cache.dtype:
        return "SGLang converts keys and values before this kernel"
    if bool((slots < 0).any()):
        return "SGLang has no negative slots"
    return first(dense(key_cache, value_cache), filled(key), aligned(key.flatten(1), 4))


def _merge_state() -> Function:
    from sgl_kernel import merge_state_v2

    def merge_state(
        prefix: T, prefix_lse: T, suffix: T, suffix_lse: T, output: T, lse: T | None = None, *_: Any
    ) -> None:
        merge_state_v2(prefix, prefix_lse, suffix, suffix_lse, output, lse)

    return merge_state


def _no_merge(
    prefix: T, prefix_lse: T, suffix: T, suffix_lse: T, output: T, lse: T | None = None, context: int | None = None,
    output_scale: T | None = None,
) -> str | None:  # fmt: skip
    if context is not None or output_scale is not None:
        return "SGLang's kernel merges all tokens, and has no scale"
    sums = [t for t in (prefix_lse, suffix_lse, lse) if t is not None]
    return first(
        same(prefix, suffix, output), dense(prefix, suffix, output, *sums), filled(prefix), aligned(prefix)
    )


_NORM = {"overwrites": (0,)}
ADAPTERS: dict[str, tuple[Baseline, ...]] = {
    "rms_norm": (_sgl(_rms_norm("rmsnorm", "fused_add_rmsnorm"), no_rms_norm, **_NORM),),
    "gemma_rms_norm": (_sgl(_rms_norm("gemma_rmsnorm", "gemma_fused_add_rmsnorm"), no_rms_norm, **_NORM),),
    "silu_and_mul": (_jit(_act_and_mul("silu_and_mul"), _no_act),),
    "gelu_and_mul": (_jit(_act_and_mul("gelu_and_mul", "gelu_tanh_and_mul"), _no_act),),
    "merge_state": (_sgl(_merge_state, _no_merge),),
    "relu2": (_jit(_relu2, _no_act),),
    "rotary_emb": (_jit(_rotary_emb, no_rotary),),
    "store_kvcache": (_jit(_store_kvcache, _no_store),),
}
