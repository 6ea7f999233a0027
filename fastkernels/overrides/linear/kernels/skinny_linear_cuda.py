"""y = x W^T + b for 1 to 16 tokens in CUDA C++ for Hopper: csrc/skinny_linear.cu, compiled at its first call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import multiprocessors
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.linear.kernels.skinny_linear_triton import supports_skinny

SOURCE = Path(__file__).parents[1] / "csrc" / "skinny_linear.cu"
MAX_TOKENS, CONSUMERS = 16, 8
THREADS = 32 * (CONSUMERS + 1)
SHARED, REGISTERS = (
    227 * 1024,
    128,
)  # bytes of shared memory of a block; registers of a thread that can hold x
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
TYPES = (_P, _P, _P, _P, _I, _I, _I, _L, _L)

# groups   a tile has groups * 16 rows of the weight
# block_k  columns that one copy reads of each of 16 rows; copies of less than 2 KiB are slow
PARAMS: tuple[dict[str, Any], ...] = ({"groups": 1, "block_k": 1024}, {"groups": 2, "block_k": 1024})


def token_tiles(m: int) -> int:
    """Return the number of tiles of 8 tokens in the kernel for m tokens."""
    return 1 if m <= 8 else 2


def shared_bytes(p: dict[str, Any], tiles: int) -> tuple[int, int]:
    """Return the number of stages that fit next to the sums, and the ring's bytes of dynamic shared memory."""
    stage = 16 * (2 * p["block_k"] + 64)
    stages = (SHARED - 4 * CONSUMERS * 16 * 8 * tiles - 128) // (stage + 16)
    return stages, stages * stage


def x_units(p: dict[str, Any], tiles: int, k: int) -> int:
    """Return the units of block_k in which a thread keeps its part of x, 0 if registers cannot hold all of it."""
    units = -(-k // p["block_k"])
    return units if 4 * units * (p["block_k"] // 32 // CONSUMERS) * tiles <= REGISTERS else 0


def fits(params: dict[str, Any], m: int, k: int) -> bool:
    """Return whether these parameters suit m tokens and K = k: all do, up to 16 tokens."""
    return m <= MAX_TOKENS and k % 32 == 0


@lru_cache(maxsize=1024)
def choose(n: int, k: int, sms: int = 132) -> dict[str, Any]:
    """Return the default parameters for weight [n, k]: large tiles if each reads x anew and there are enough."""
    return PARAMS[int(k > 4096 and -(-n // 32) >= 0.9 * sms)]


def refused(
    source: Path, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    supports: Callable[..., str | None] = supports_skinny,
) -> str | None:  # fmt: skip
    """Return why the kernels of this source do not support this call, None if they may."""
    if (reason := no_hopper(source, x.device) or supports(x, weight, bias)) is not None:
        return reason
    if x.data_ptr() % 16 or any(s % 8 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1):
        return f"x has strides {tuple(x.stride())}: its rows must start at 16 bytes"
    if bias is not None and bias.dtype != x.dtype:
        return f"bias is {bias.dtype}, x is {x.dtype}"
    return None


def supports_cuda(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """Return why the CUDA C++ kernel for few tokens does not support this call, None if it does."""
    if (reason := refused(SOURCE, x, weight, bias)) is not None:
        return reason
    k = weight.shape[1]
    if k % 32:
        return f"K = {k} is not a multiple of 32"
    if x.numel() // k > MAX_TOKENS:
        return f"more than {MAX_TOKENS} tokens"
    return None


def options(p: dict[str, Any], m: int, k: int, bf16: bool, bias: bool) -> tuple[str, ...]:
    """Return NVRTC's options, without the architecture."""
    tiles = token_tiles(m)
    return (
        "--std=c++17", f"-DGROUPS={p['groups']}", f"-DTOKEN_TILES={tiles}", f"-DKC={p['block_k']}",
        f"-DSTAGES={shared_bytes(p, tiles)[0]}", f"-DX_UNITS={x_units(p, tiles, k)}", f"-DBF16={int(bf16)}",
        f"-DHAS_BIAS={int(bias)}",
    )  # fmt: skip


@lru_cache(maxsize=256)
def _kernel(device: torch.device, shared: int, told: tuple[str, ...]) -> cuda_rtc.Kernel:
    return cuda_rtc.Kernel(text(SOURCE), "skinny_linear", told, device.index, TYPES, shared)


def kernel_for(
    device: torch.device, p: dict[str, Any], m: int, k: int, bf16: bool, bias: bool
) -> cuda_rtc.Kernel:
    """Return the kernel with these parameters for m tokens, compiled and loaded."""
    shared = shared_bytes(p, token_tiles(m))[1]
    return _kernel(device, shared, options(p, m, k, bf16, bias))


def linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **params: Any
) -> torch.Tensor:
    """x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N] in x's dtype.

    params: one of PARAMS; the defaults are those of `choose`. In a CUDA graph this kernel prefetches the weight while
    the previous kernel still runs, which must not write it.
    """
    n, k = weight.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    sms = multiprocessors(x.device)
    p = {**choose(n, k, sms), **params}
    kernel = kernel_for(x.device, p, m, k, x.dtype == torch.bfloat16, bias is not None)
    pointers = (None if t is None else t.data_ptr() for t in (rows, weight, bias, out))
    stream = torch.cuda.current_stream(x.device).cuda_stream
    args = (*pointers, m, n, k, rows.stride(0), weight.stride(0))
    early = overlaps(x.device) and torch.cuda.is_current_stream_capturing()
    kernel.launch(min(sms, -(-n // (16 * p["groups"]))), THREADS, stream, args, overlap=early)
    return out
