"""The kernel of fork_wgmma.py for float8 e4m3, two values in each 16-bit word, with scales."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from fastkernels.core import cuda_rtc
from fastkernels.core.cuda_rtc import nvrtc  # type: ignore[attr-defined]  # of plain/cuda_rtc.py
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.linear.wgmma_linear_cuda import (  # type: ignore[attr-defined]  # of fork_wgmma.py
    TYPES,
    tile,
    wgmma_kernel,
)


class Scales(ctypes.Structure):
    """Addresses and strides: by token, by block of K; by row or block of rows of the weight, by block of K."""

    _fields_ = [(name, ctypes.c_void_p) for name in "xw"] + [(name, ctypes.c_int) for name in "tbrk"]


FP8_TYPES = (*TYPES, Scales)


def scale_strides(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> Any:
    """Return the four strides: for scales of tensors, of rows, or of 128 columns and 128 x 128 weights; else None."""
    (n, k), m = weight.shape, x.numel() // x.shape[-1]
    if [*x_scale.shape, *weight_scale.shape] == [m, -(-k // 128), -(-n // 128), -(-k // 128)]:
        return *x_scale.stride(), *weight_scale.stride()
    x_one, weight_one = x_scale.numel() == 1, weight_scale.numel() == 1
    rows = (x_one or x_scale.numel() == m) and (weight_one or weight_scale.numel() == n)
    return (
        (0 if x_one else x_scale.stride(0), 0, 0 if weight_one else weight_scale.stride(0), 0)
        if rows
        else None
    )


def supports_wgmma_fp8(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    """Return why the wgmma kernel does not support this call, None if it does."""
    (n, k), dtype = weight.shape, out_dtype or torch.bfloat16
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9 and nvrtc is not None
    fits = k >= 128 and k % 16 == 0 and n > 0 and 1 <= x.numel() // k <= 64
    of_rows = (*x.stride()[:-1], weight.stride(0))
    dense = x.stride(-1) == weight.stride(1) == 1 and all(s >= k and s % 16 == 0 for s in of_rows)
    aligned = x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    dtypes = x.dtype == weight.dtype == FP8 and x_scale.dtype == weight_scale.dtype == torch.float32
    out = dtype in (torch.bfloat16, torch.float16) and (bias is None or bias.dtype == dtype)
    fits = fits and dtypes and out and scale_strides(x, weight, x_scale, weight_scale) is not None
    return None if hopper and dense and aligned and fits else "another chip, size, dtype or layout"


def linear_fp8_wgmma(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """In a CUDA graph the weight is prefetched while the previous kernel still runs, which must not write it."""
    (n, k), rows = weight.shape, x.reshape(-1, x.shape[-1])
    m, sms = len(rows), torch.cuda.get_device_properties(x.device).multi_processor_count
    out = torch.empty((*x.shape[:-1], n), dtype=out_dtype or torch.bfloat16, device=x.device)
    at = scale_strides(x, weight, x_scale, weight_scale)
    blocks = at[3] > 0
    sizes = tile(m, n, k // 2, sms, 128, 7 * 1024 if blocks else 1024)
    x_map = cuda_rtc.tensor_map(rows.data_ptr(), m, k // 2, rows.stride(0) // 2, sizes[1])
    w_map = cuda_rtc.tensor_map(weight.data_ptr(), n, k // 2, weight.stride(0) // 2, sizes[0])
    scales = Scales(x_scale.data_ptr(), weight_scale.data_ptr(), *at)
    kernel = wgmma_kernel(x.device, sizes, "e4m3", out.dtype == torch.bfloat16, 2 if blocks else 1, FP8_TYPES)
    pointers = [None if bias is None else bias.data_ptr(), out.data_ptr(), None, None]
    grid, stream = min(-(-n // sizes[0]), sms), torch.cuda.current_stream(x.device).cuda_stream
    args, early = [x_map, w_map, *pointers, m, n, k // 2, scales], torch.cuda.is_current_stream_capturing()
    kernel.launch(grid, 224 if blocks else 192, stream, args, early)
    return out
