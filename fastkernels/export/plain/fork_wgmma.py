"""y = x W^T + b for 1 to 64 tokens with Hopper's wgmma: one split of K, and the parameters that win most often."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import cuda_rtc
from fastkernels.core.cuda_rtc import nvrtc  # type: ignore[attr-defined]  # of plain/cuda_rtc.py
from fastkernels.overrides.kit.hopper import SHARED_SOURCE

SOURCE = str(Path(__file__).with_name("wgmma_linear.cu"))  # an exported file has its text
TYPES = (*[cuda_rtc.TensorMap] * 2, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 3)


@lru_cache(maxsize=4096)
def tile(m: int, n: int, k: int, sms: int, least: int = 64, reserved: int = 0) -> tuple[int, ...]:
    """Return rows and tokens of a tile, columns of a stage, stages, and those prefetched before x.

    least, reserved  columns of a stage, and bytes of shared memory that the stages cannot use
    """
    fewest = -(-n // (128 * sms))  # tiles of a multiprocessor, if they are as large as possible
    choices = [(tiles, -(-n // (8 * tiles * sms)) * 8) for tiles in range(fewest, fewest + 8)]
    rows = min(choices, key=lambda c: c[0] * (c[1] + 16))[1]  # a tile costs 16 rows extra, for reading x
    tokens = next(t for t in (8, 16, 32, 64) if t >= m)
    room = {b: min((225 * 1024 - reserved) // (2 * b * (rows + tokens)), 16) for b in (256, 128, least)}
    block_k = next((b for b in (256, 128) if room[b] >= 4 and k), least)
    return rows, tokens, block_k, room[block_k], min(-(-32768 // (block_k * rows)), room[block_k])


def supports_wgmma(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """Return why the wgmma kernel does not support this call, None if it does."""
    (n, k), dtypes = weight.shape, {t.dtype for t in (x, weight, bias) if t is not None}
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9 and nvrtc is not None
    fits = k >= 64 and k % 8 == 0 and n > 0 and 1 <= x.numel() // k <= 64
    of_rows = (*x.stride()[:-1], weight.stride(0))
    dense = x.stride(-1) == weight.stride(1) == 1 and all(s >= k and s % 8 == 0 for s in of_rows)
    aligned = x.data_ptr() % 16 == weight.data_ptr() % 16 == 0 and (bias is None or bias.is_contiguous())
    sixteen = dtypes in ({torch.bfloat16}, {torch.float16})
    return None if hopper and sixteen and fits and dense and aligned else "another size, dtype or layout"


def multiply(rows: int, kind: str) -> str:
    """Return CUDA C++ of multiply(): wgmma for a tile of so many rows of 'bf16', 'f16' or 'e4m3'."""
    count, k, layout = rows // 2, 32 if kind == "e4m3" else 16, "" if kind == "e4m3" else ", 0, 0"
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(float (&c)[{count}], unsigned long long a, unsigned long long b, int add) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;"
        " wgmma.mma_async.sync.aligned.m64n{rows}k{k}.f32.{kind}.{kind}"
        " {{{sums}}}, %{count}, %{count + 1}, p, 1, 1{layout}; }}"
        : {operands} : "l"(a), "l"(b), "r"(add) : "memory");
}}
"""


@lru_cache(maxsize=256)
def wgmma_kernel(
    device: torch.device, sizes: tuple[int, ...], kind: str, bf16: bool, scales: int, types: Any
) -> Any:
    names = ("ROWS", "TOKENS", "BLOCK_K", "STAGES", "AHEAD", "SPLITS", "BF16", "SCALES")
    options = [f"-D{name}={value}" for name, value in zip(names, (*sizes, 1, int(bf16), scales), strict=True)]
    source = f"{multiply(sizes[0], kind)}{SHARED_SOURCE}{SOURCE}"
    shared = sizes[3] * 2 * sizes[2] * (sizes[0] + sizes[1]) + 1024  # the stages, and their alignment
    return cuda_rtc.Kernel(source, "wgmma_linear", ["--std=c++17", *options], device.index, types, shared)


def linear_wgmma(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In a CUDA graph the weight is prefetched while the previous kernel still runs, which must not write it."""
    (n, k), rows = weight.shape, x.reshape(-1, x.shape[-1])
    m, sms = len(rows), torch.cuda.get_device_properties(x.device).multi_processor_count
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    sizes = tile(m, n, k, sms)
    x_map = cuda_rtc.tensor_map(rows.data_ptr(), m, k, rows.stride(0), sizes[1])
    w_map = cuda_rtc.tensor_map(weight.data_ptr(), n, k, weight.stride(0), sizes[0])
    bf16, stream = x.dtype == torch.bfloat16, torch.cuda.current_stream(x.device).cuda_stream
    kernel = wgmma_kernel(x.device, sizes, "bf16" if bf16 else "f16", bf16, 0, TYPES)
    args = [x_map, w_map, None if bias is None else bias.data_ptr(), out.data_ptr(), None, None, m, n, k]
    kernel.launch(min(-(-n // sizes[0]), sms), 192, stream, args, torch.cuda.is_current_stream_capturing())
    return out
