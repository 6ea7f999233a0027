"""A decode step of attention in CUDA C++ for Hopper, with the parameters that win most often."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from triton import next_power_of_2

from fastkernels.core import cuda_rtc
from fastkernels.core.cuda_rtc import nvrtc  # type: ignore[attr-defined]  # of plain/cuda_rtc.py
from fastkernels.overrides.kit.hopper import SHARED_SOURCE

SOURCE = str(Path(__file__).with_name("attention_decode.cu"))  # an exported file has its text
LANES = str(Path(__file__).with_name("attention_decode_lanes.cu"))
TYPES = (
    *[ctypes.c_void_p] * 8, *[ctypes.c_int] * 14, *[ctypes.c_float] * 2, *[ctypes.c_int] * 2, ctypes.c_float,
    ctypes.c_void_p,
)  # fmt: skip
KERNELS: dict[Any, Any] = {}


def constants(
    q: torch.Tensor, key_cache: torch.Tensor, window: bool, softcap: bool
) -> tuple[dict[str, int], int]:
    """Return what the kernel is compiled with, and the bytes of shared memory: rings, sums, lengths and notes."""
    group, page, size = q.shape[1] // key_cache.shape[2], key_cache.shape[1], q.shape[2]
    width = next(width for width in (64, 128, 256) if width >= size)  # of a row in shared memory
    warps, seqs = 4 if width == 256 else 8, max(next_power_of_2(max(q.shape[0], 1)), 256)
    rest, sums = warps * 192 * width + 4 * (2 * seqs + warps + 3), group * (4 * width + 24)
    slots = max(n for n in (1, 2, 4, warps) if n == 1 or rest + n * sums <= 227 * 1024)
    told = {
        "HEADS": group, "HEAD_SIZE": size, "D": width, "PAGE": page, "WARPS": warps, "KEYS": 16, "STAGES": 3,
        "RESIDENT": 1, "AHEAD": 2, "CLUSTER": 1, "WHOLE": 0, "SEQS": seqs, "BF16": int(q.dtype == torch.bfloat16),
        "WINDOW": int(window), "SOFTCAP": int(softcap), "SINKS": 0, "SLOTS": slots, "FP8": 0, "QUERY8": 0,
    }  # fmt: skip
    return told, rest + slots * sums


def supports_cuda(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_k: int, scale: float, window_left: int = -1, softcap: float = 0.0,
    k_scale: float = 1.0, v_scale: float = 1.0, sinks: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why the kernel does not support this call, None if it does."""
    tensors, keys = (q, key_cache, value_cache), block_table.shape[1] * key_cache.shape[1]
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9 and nvrtc is not None
    shapes = key_cache.shape == value_cache.shape and q.shape[2] == key_cache.shape[3] and q.shape[0] <= 4096
    heads = q.shape[1] % key_cache.shape[2] == 0 and q.shape[1] <= 16 * key_cache.shape[2]
    dtypes = q.dtype == key_cache.dtype == value_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    dtypes = dtypes and seq_lens.dtype == block_table.dtype == torch.int32
    dense = all(t.stride(-1) == 1 for t in (*tensors, seq_lens, block_table))
    aligned = all(t.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in t.stride()[:-1]) for t in tensors)
    # Offsets and shares are computed with 32 bits.
    small = all(t.shape[0] * t.stride(0) < 1 << 35 for t in tensors[1:])
    small = small and q.shape[0] * max(keys, 16) < 1 << 26
    fits = hopper and shapes and heads and dtypes and dense and aligned and small and sinks is None
    if not fits or q.shape[2] > 256 or q.shape[2] % 8 or q.numel() == 0:
        return "another chip, size, dtype or layout"
    told, shared = constants(q, key_cache, window_left >= 0, softcap > 0)
    loaded = (q.device, *told.values()) in KERNELS or not torch.cuda.is_current_stream_capturing()
    return (
        None if shared <= 227 * 1024 and loaded else "too much shared memory, or not loaded before a capture"
    )


def decode_cuda(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_k: int, scale: float, window_left: int = -1, softcap: float = 0.0,
    k_scale: float = 1.0, v_scale: float = 1.0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """q: [B, heads, D]; caches: [blocks, page, key heads, D]. In a CUDA graph keys are prefetched early."""
    (batch, heads, _), kv_heads = q.shape, key_cache.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    told, shared = constants(q, key_cache, window_left >= 0, softcap > 0)
    key, stream = (q.device, *told.values()), torch.cuda.current_stream(q.device).cuda_stream
    if key not in KERNELS:
        options = ["--std=c++17", *(f"-D{name}={value}" for name, value in told.items())]
        source = f"{SHARED_SOURCE}{LANES}{SOURCE}"
        KERNELS[key] = cuda_rtc.Kernel(source, "attention_decode", options, q.device.index, TYPES, shared)
    workers = max(torch.cuda.get_device_properties(q.device).multi_processor_count // kv_heads, 1)
    # Of each part: sums, the maximum, and the sum of weights
    parts = torch.empty(2 * workers * heads * (told["D"] + 2), dtype=torch.float32, device=q.device)
    taken = torch.zeros(kv_heads * workers, dtype=torch.int32, device=q.device)
    pointers = [t.data_ptr() for t in (q, key_cache, value_cache, out, parts, taken, seq_lens, block_table)]
    strides = [s // 8 for s in (*q.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3])]
    sizes = [batch, kv_heads, key_cache.shape[0], block_table.shape[1], 8, *strides, block_table.stride(0)]
    early, log2e = torch.cuda.is_current_stream_capturing(), 1.4426950408889634
    floats = [scale * k_scale * log2e, v_scale, int(early), window_left, softcap * log2e, None]
    KERNELS[key].launch(kv_heads * workers, 32 * told["WARPS"], stream, [*pointers, *sizes, *floats], early)
    return out
