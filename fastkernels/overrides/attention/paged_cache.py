"""Checks and helpers of the ops that attend over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.overrides.kit.fp8 import fp8_refusal

MAX_HEAD_SIZE = 512  # of Triton's kernels: that of Gemma 4's layers with full attention


def take_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return cache[blocks]. An fp8 cache is indexed as bytes: PyTorch does not index fp8 on every device."""
    if cache.dtype != torch.float8_e4m3fn:
        return cache[blocks]
    return cache.view(torch.uint8)[blocks].view(cache.dtype)


def check(name: str, q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raise ValueError if q [T, Hq, D] and the caches [blocks, block_size, Hkv, D] do not match."""
    if q.dim() != 3 or key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"{name}: q must be [T, Hq, D] and both caches [blocks, block_size, Hkv, D], got {tuple(q.shape)},"
            f" {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if q.shape[2] != key_cache.shape[3] or q.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"{name}: {q.shape[1]} query heads of {q.shape[2]} do not fit {key_cache.shape[2]} key heads of"
            f" {key_cache.shape[3]}"
        )


def dtype_of(q: torch.Tensor) -> torch.dtype:
    """Return the dtype of a result: q's, bfloat16 for q in fp8."""
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def memory(name: str, q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return `out`, or new memory for a result of q's shape. Raises ValueError if `out` cannot hold it."""
    if out is None:
        return torch.empty(q.shape, dtype=dtype_of(q), device=q.device)
    dtypes = dtype_of(q), torch.float16 if q.dtype == torch.float8_e4m3fn else q.dtype
    if out.shape != q.shape or out.dtype not in dtypes or not out.is_contiguous():
        raise ValueError(
            f"{name}: out must be contiguous {tuple(q.shape)} {dtype_of(q)}, got {tuple(out.shape)} {out.dtype} with"
            f" strides {out.stride()}"
        )
    return out


def no_sinks(supports: Callable[..., str | None]) -> Callable[..., str | None]:
    """`supports` of a kernel that has no attention sinks: it refuses calls of attention_decode or _prefill with them.

    Sinks are the last argument, after scalars.
    """

    def checked(*args: Any, sinks: torch.Tensor | None = None, **kwargs: Any) -> str | None:
        if sinks is not None or isinstance(args[-1], torch.Tensor):
            return "it has no attention sinks"
        return supports(*(args[:-1] if args[-1] is None else args), **kwargs)

    return checked


def no_alibi(supports: Callable[..., str | None], position: int) -> Callable[..., str | None]:
    """`supports` of a kernel without ALiBi and trees, whose slopes and masks are arguments from `position` on."""

    def checked(*args: Any, alibi_slopes: Any = None, tree: Any = None, **kwargs: Any) -> str | None:
        if alibi_slopes is not None or tree is not None or any(a is not None for a in args[position:]):
            return "it has no ALiBi and no trees of drafts"
        return supports(*args[:position], **kwargs)

    return checked


def supports_triton(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *_: Any, **__: Any
) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {q.dtype} is not float16, bfloat16 or float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"the caches are {key_cache.dtype} and {value_cache.dtype}, q is {q.dtype}"
    if key_cache.dtype == torch.float8_e4m3fn and (reason := fp8_refusal(q.device)) is not None:
        return reason
    if q.shape[-1] > MAX_HEAD_SIZE:
        return f"head size {q.shape[-1]} is over {MAX_HEAD_SIZE}"
    for name, t in (("q", q), ("key_cache", key_cache), ("value_cache", value_cache)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None
