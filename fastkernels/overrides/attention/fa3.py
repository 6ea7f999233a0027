"""FlashAttention-3 as a provider of prefill and decode: vLLM's build of it, or the package flash_attn_interface.

vLLM's build is loaded without vLLM itself, whose import takes seconds.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import cache
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch

from fastkernels.core.dispatch import ForOthers
from fastkernels.overrides.attention.paged_cache import check, supports_triton

SINK_HEADS = 64  # the most of which its kernels load the sinks
MODULES = ("vllm.vllm_flash_attn", "flash_attn_interface")

PACKAGE = "_fastkernels_vllm_flash_attn"  # the name under which vLLM's folder is imported


def load(module: str) -> Any:
    """Import `module` (vllm.vllm_flash_attn), without importing vLLM where that is possible. Raises ImportError.

    That is possible where the process has not imported vLLM and the module's entry points need nothing else of it.
    """
    host = module.partition(".")[0]
    if host not in sys.modules:
        try:
            return _alone(module)
        except Exception:  # another version, whose entry points need more of vLLM
            sys.modules.pop(PACKAGE, None)
            sys.modules.pop(f"{PACKAGE}.flash_attn_interface", None)
    return importlib.import_module(module)


def _alone(module: str) -> Any:
    found, path = None, None
    for name in module.split("."):
        found = PathFinder.find_spec(name, path)
        if found is None or not found.submodule_search_locations:
            raise ImportError(f"there is no package {module}")
        path = list(found.submodule_search_locations)
    package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    package.__path__ = path or []
    entries = importlib.import_module(f"{PACKAGE}.flash_attn_interface")
    if not entries.FA3_AVAILABLE:
        raise ImportError(f"{module} has no FlashAttention-3: {entries.FA3_UNAVAILABLE_REASON}")
    return entries


@cache
def entry_point() -> tuple[Any, bool]:
    """Return FlashAttention-3's entry point, and whether it is vLLM's build."""
    try:
        return load(MODULES[0]).flash_attn_varlen_func, True
    except ImportError:
        return importlib.import_module(MODULES[1]).flash_attn_with_kvcache, False


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def _has_sinks() -> bool:
    try:
        entry, is_vllm = entry_point()
    except ImportError:
        return False
    return is_vllm and "s_aux" in inspect.signature(entry).parameters


@cache
def _is_vllms() -> bool:
    try:
        return entry_point()[1]
    except ImportError:
        return False


def _no_sinks(sinks: torch.Tensor, heads: int) -> str | None:
    if not _has_sinks():
        return "it has no attention sinks"
    if sinks.dtype != torch.bfloat16 or sinks.shape != (heads,) or not sinks.is_contiguous():
        return (
            f"FlashAttention-3 needs contiguous bfloat16 sinks of {heads} heads, got {sinks.dtype} of shape"
            f" {tuple(sinks.shape)} with strides {sinks.stride()}"
        )
    if heads > SINK_HEADS:
        return f"FlashAttention-3 takes sinks of up to {SINK_HEADS} heads, got {heads}"
    return None


def supports(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *rest: Any,
    sinks: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why FlashAttention-3 does not compute a call of attention_decode or _prefill: the sinks are last."""
    if sinks is None and rest and isinstance(rest[-1], torch.Tensor):
        sinks = rest[-1]
    if sinks is not None and (reason := _no_sinks(sinks, q.shape[1])) is not None:
        return reason
    if _capability(q.device.index or 0)[0] != 9:
        return "FlashAttention-3 needs a Hopper GPU (compute capability 9.x)"
    fp8 = torch.float8_e4m3fn
    if key_cache.dtype == fp8 and q.dtype != fp8:
        return "FlashAttention-3 reads fp8 caches with fp8 queries only, which are less exact"
    if q.dtype == key_cache.dtype == value_cache.dtype == fp8 and _is_vllms():
        pass
    elif q.dtype not in (torch.float16, torch.bfloat16) or key_cache.dtype != q.dtype:
        return f"FlashAttention-3 needs float16 or bfloat16, got q {q.dtype} and cache {key_cache.dtype}"
    if q.shape[-1] % 8:
        return f"FlashAttention-3 needs a head size that is a multiple of 8, got {q.shape[-1]}"
    if q.shape[-1] > 256:
        return ForOthers(f"FlashAttention-3 takes head sizes up to 256, got {q.shape[-1]}")
    if key_cache.shape[1] % 16:
        return f"FlashAttention-3 is used with block sizes that are multiples of 16, got {key_cache.shape[1]}"
    return None if q.dtype == fp8 else supports_triton(q, key_cache, value_cache)


def attend(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
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
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run FlashAttention-3 with the arguments of attention_prefill.reference.

    FA3 writes zeros for a sequence with queries but no keys, and nothing past the last sequence: padding rows keep what
    `out` holds (zeros if `out` is None).
    """
    check("attention", q, key_cache, value_cache)
    if out is None:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    entry, is_vllm = entry_point()
    window = (window_left, 0 if window_left >= 0 else -1)
    scale *= k_scale
    if is_vllm:
        entry(
            q, key_cache, value_cache, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=seq_lens,
            softmax_scale=scale, causal=True, window_size=list(window), softcap=softcap, block_table=block_table,
            out=out, fa_version=3, **({} if sinks is None else {"s_aux": sinks}),
        )  # fmt: skip
    else:
        out = entry(
            q, key_cache, value_cache, cache_seqlens=seq_lens, page_table=block_table, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, softmax_scale=scale, causal=True, window_size=window, softcap=softcap,
        )  # fmt: skip
    return out if v_scale == 1.0 else out * v_scale


def supports_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
) -> str | None:
    """Return why FlashAttention-3 does not compute this call of attention_dense, or None."""
    if _capability(q.device.index or 0)[0] != 9:
        return "FlashAttention-3 needs a Hopper GPU (compute capability 9.x)"
    if attn_mask is not None:
        return "FlashAttention-3 takes no mask"
    if q.dtype not in (torch.float16, torch.bfloat16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all float16 or all bfloat16"
    if q.shape[3] > 256 or q.shape[3] % 8:
        return f"head size {q.shape[3]} is not a multiple of 8 up to 256"
    return None


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Run FlashAttention-3 with the arguments of attention_dense.reference, a batch as concatenated sequences."""
    (batch, n_q), n_k = q.shape[:2], k.shape[1]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        cu_seqlens_q, cu_seqlens_k = (
            torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n for n in (n_q, n_k)
        )
        max_seqlen_q, max_seqlen_k = n_q, n_k
    flat = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
    shared = {"softmax_scale": scale, "causal": False}
    if entry_point()[1]:
        found = entry_point()[0](
            *flat, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, fa_version=3, **shared
        )
    else:
        entry = importlib.import_module(MODULES[1]).flash_attn_varlen_func
        found = entry(*flat, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **shared)
    out = found[0] if isinstance(found, tuple) else found
    return out.reshape(q.shape)
