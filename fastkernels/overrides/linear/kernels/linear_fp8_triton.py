"""FP8 linear layers in Triton for every granularity of scales. Sums of 128 products are added up in float32."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, check, strides


@triton.jit
def _linear_fp8_kernel(
    x_ptr, w_ptr, xs_ptr, ws_ptr, b_ptr, out_ptr, M, N, x_stride, w_stride, xs_token, xs_block, ws_row, ws_block,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs that share a column of weight blocks are neighbours: one reads the weight from memory, the rest from L2.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    xs_at, ws_at = xs_ptr + rows * xs_token, ws_ptr + (cols // BLOCK_K if BLOCKS else cols) * ws_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + ks[None, :],
            mask=(rows[:, None] < M) & (ks[None, :] < K),
            other=0.0,
        )
        w = tl.load(
            w_ptr + cols[None, :] * w_stride + ks[:, None],
            mask=(cols[None, :] < N) & (ks[:, None] < K),
            other=0.0,
        )
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        # Hopper's tensor cores accumulate FP8 products with 14 bits: at most 128 of them are summed there.
        part = tl.dot(x, w)
        if BLOCKS:
            xs = tl.load(xs_at + k // BLOCK_K * xs_block, mask=rows < M, other=0.0)
            ws = tl.load(ws_at + k // BLOCK_K * ws_block, mask=cols < N, other=0.0)
            acc += part * (xs[:, None] * ws[None, :])
        else:
            acc += part
    if not BLOCKS:
        xs = tl.load(xs_at, mask=rows < M, other=0.0)
        ws = tl.load(ws_at, mask=cols < N, other=0.0)
        acc = acc * xs[:, None] * ws[None, :]
    if HAS_BIAS:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def unsupported(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Return why no kernel supports this call (dtypes or strides), None if some may."""
    if x.dtype != FP8 or weight.dtype != FP8:
        return f"x is {x.dtype} and weight {weight.dtype}, not float8_e4m3fn"
    if x_scale.dtype != torch.float32 or weight_scale.dtype != torch.float32:
        return f"scales are {x_scale.dtype} and {weight_scale.dtype}, not float32"
    if out_dtype not in (None, torch.bfloat16, torch.float16):
        return f"out_dtype {out_dtype} is not bfloat16 or float16"
    if weight.stride(-1) != 1:
        return f"weight has strides {tuple(weight.stride())}: the last dimension must be contiguous"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {tuple(bias.stride())}, not contiguous"
    return None


def supports_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Return why the Triton kernel does not support this call, None if it does."""
    return unsupported_fp8(x.device) or unsupported(x, weight, x_scale, weight_scale, bias, out_dtype)


def unsupported_fp8(device: torch.device) -> str | None:
    """Return why Triton kernels cannot multiply float8 e4m3 on the device, None if they can."""
    if device.type == "cuda" and _capability(device) < (8, 9):
        return "this GPU has no float8_e4m3fn arithmetic (it needs compute capability 8.9)"
    return None


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def linear_fp8_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    kind = check(x, weight, x_scale, weight_scale, bias)
    n, k = weight.shape
    rows = x.reshape(-1, k)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=out_dtype or torch.bfloat16, device=x.device)
    if m == 0 or n == 0:
        return out
    scales, at = strides(kind, x_scale, weight_scale)
    block_m = 16 if m <= 16 else 64 if m <= 64 else 128
    block_n = 32 if m <= 16 else 64 if m <= 64 else 128
    grid = (cdiv(m, block_m), cdiv(n, block_n))
    _linear_fp8_kernel[grid](
        rows, weight, scales, weight_scale, bias, out, m, n, rows.stride(0), weight.stride(0), *at, K=k,
        HAS_BIAS=bias is not None, BLOCKS=kind == BLOCK, UPCAST=x.device.type == "cpu", BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=BLOCK, num_warps=8 if block_m == 128 else 4, num_stages=4 if m <= 64 else 3,
    )  # fmt: skip
    return out
