"""FP8 linear layers for 1 to 64 tokens with Hopper's wgmma: csrc/wgmma_linear.cu, compiled at its first call.

It is the kernel for 16-bit values, with two float8 values in each word. In addition it applies scales, and adds sums of
128 columns in float32.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import no_hopper, text
from fastkernels.overrides.kit.launch import multiprocessors, tickets
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.linear.kernels import wgmma_linear_cuda as wgmma
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, check, strides
from fastkernels.overrides.linear.kernels.linear_fp8_triton import unsupported
from fastkernels.overrides.linear.kernels.skinny_linear_triton import MAX_TOKENS
from fastkernels.overrides.linear.kernels.wgmma_linear_cuda import Plan, cost

WORDS = 64  # of 16 bits, in 128 columns
OF_ROWS = 1024  # bytes of shared memory for scales per token and row
OF_BLOCKS = 7 * 1024  # at most, for block scales in the ring


class Scales(ctypes.Structure):
    """The kernel's parameter: addresses and strides of the scales."""

    _fields_ = [
        ("x", ctypes.c_void_p), ("w", ctypes.c_void_p), ("x_token", ctypes.c_int), ("x_block", ctypes.c_int),
        ("w_row", ctypes.c_int), ("w_block", ctypes.c_int),
    ]  # fmt: skip


TYPES = (*wgmma.TYPES, Scales)
# As in wgmma_linear_cuda, but tiles have half as many rows, since a thread keeps three copies of their sums.
PARAMS: tuple[dict[str, Any], ...] = (
    *(
        {"splits": splits, "stages": stages, "rows": rows}
        for splits, stages, rows in (
            (1, 4, 128), (1, 8, 128), (1, 4, 64), (2, 4, 128), (2, 8, 128), (4, 4, 128), (4, 8, 64),
        )
    ),
    {"splits": 1, "stages": 4, "rows": 128, "ahead": 64},
)  # fmt: skip


def plan(
    m: int, n: int, k: int, splits: int, stages: int, rows: int, ahead: int = 0, blocks: bool = False, sms: int = 132,
) -> Plan:  # fmt: skip
    """Return the plan for float8 x [m, k] and weight [n, k], in 16-bit words. blocks: with block scales."""
    reserved = OF_BLOCKS if blocks else OF_ROWS
    sizes = (splits, stages, rows, ahead)
    return wgmma.plan(m, n, k // 2, *sizes, sms=sms, least=2 * WORDS, reserved=reserved)


def fits(params: dict[str, Any], m: int, k: int) -> bool:
    """Return whether these parameters suit m tokens and K = k."""
    return wgmma.fits(params, m, k // 2)


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, blocks: bool = False, sms: int = 132) -> dict[str, Any]:
    """Return the default parameters for x [m, k] and weight [n, k]: one split, of equal plans the one with `ahead`."""
    sets = [p for p in PARAMS if p["splits"] == 1]
    return min(
        sets, key=lambda p: (cost(plan(m, n, k, **p, blocks=blocks, sms=sms), k // 2), "ahead" not in p)
    )


def supports_wgmma_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Return why the wgmma kernel does not support this call, None if it does."""
    if (reason := no_hopper(wgmma.SOURCE, x.device)) is not None:
        return reason
    if (reason := unsupported(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    n, k = weight.shape
    if k < 2 * WORDS or k % 16:
        return f"K = {k} is under {2 * WORDS} or no multiple of 16"
    if x.numel() // k > MAX_TOKENS:
        return f"more than {MAX_TOKENS} tokens"
    if bias is not None and bias.dtype != (out_dtype or torch.bfloat16):
        return f"bias is {bias.dtype}, the result {out_dtype or torch.bfloat16}"
    wrong = x.stride(-1) != 1 or any(
        s % 16 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1
    )
    if wrong or x.data_ptr() % 16:
        return f"x has strides {tuple(x.stride())}: its rows must be contiguous and start at 16 bytes"
    if (n > 1 and (weight.stride(0) % 16 or weight.stride(0) < k)) or weight.data_ptr() % 16:
        return f"weight has strides {tuple(weight.stride())}: its rows must start at 16 bytes and not overlap"
    return None


def source(p: Plan) -> str:
    """Return the whole text that NVRTC compiles."""
    return wgmma.multiply(p.rows, "e4m3") + text(wgmma.SOURCE)


def options(p: Plan, bf16: bool, blocks: bool) -> tuple[str, ...]:
    """Return NVRTC's options, without the architecture."""
    return wgmma.options(p, bf16, 2 if blocks else 1)


def kernel_for(device: torch.device, p: Plan, bf16: bool, blocks: bool) -> cuda_rtc.Kernel:
    """Return the kernel of this plan, compiled and loaded.

    bf16    whether the result is bfloat16 (else float16)
    blocks  whether there are block scales
    """
    return _kernel(device, p._replace(items=0, grid=0), bf16, blocks)  # one kernel for any number of items


@lru_cache(maxsize=256)
def _kernel(device: torch.device, p: Plan, bf16: bool, blocks: bool) -> cuda_rtc.Kernel:
    told = options(p, bf16, blocks)
    return cuda_rtc.Kernel(source(p), "wgmma_linear", told, device.index, TYPES, p.shared)


def linear_fp8_wgmma(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **params: Any,
) -> torch.Tensor:
    """Run the op with one of PARAMS; the defaults are those of `choose`.

    In a CUDA graph this kernel prefetches the weight while the previous kernel still runs, which must not write it.
    """
    blocks = check(x, weight, x_scale, weight_scale, bias) == BLOCK
    n, k = weight.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=out_dtype or torch.bfloat16, device=x.device)
    if m == 0 or n == 0:
        return out
    if m > 1 and rows.stride(0) < k:  # expanded from one row
        rows = rows.contiguous()
    sms = multiprocessors(x.device)
    p = plan(m, n, k, **{**choose(m, n, k, blocks, sms), **params}, blocks=blocks, sms=sms)
    kernel = kernel_for(x.device, p, out.dtype == torch.bfloat16, blocks)
    scale_rows, at = strides(BLOCK if blocks else 1, x_scale, weight_scale)
    scales = Scales(scale_rows.data_ptr(), weight_scale.data_ptr(), *at)
    x_map = _map(rows, m, k, p.tokens)
    w_map = _map(weight, n, k, p.rows)
    parts = taken = None
    if p.splits > 1:
        parts = torch.empty(p.workspace, dtype=torch.float32, device=x.device)
        taken = tickets.get(x.device, p.items // p.splits)
    pointers = (None if t is None else t.data_ptr() for t in (bias, out, parts, taken))
    stream = torch.cuda.current_stream(x.device).cuda_stream
    early = overlaps(x.device) and torch.cuda.is_current_stream_capturing()
    args = (x_map, w_map, *pointers, m, n, k // 2, scales)
    threads = wgmma.THREADS + (32 if blocks else 0)
    kernel.launch(p.grid, threads, stream, args, overlap=early)
    return out


def _map(of: torch.Tensor, rows: int, k: int, box_rows: int) -> cuda_rtc.TensorMap:
    """Return the tensor map of a float8 matrix, as one of 16-bit words."""
    return cuda_rtc.tensor_map(of.data_ptr(), rows, k // 2, (of.stride(0) if rows > 1 else k) // 2, box_rows)
