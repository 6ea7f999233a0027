"""The float8 product of plain/scaled_mm_HOST.py for 1 to 64 tokens, with scales of tensors, tokens and columns."""

from __future__ import annotations

import ctypes
import struct

import torch

from fastkernels.core import cuda_rtc
from fastkernels.core.cuda_rtc import nvrtc  # type: ignore[attr-defined]  # of plain/cuda_rtc.py
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.linear.kernels.wgmma_linear_cuda import (  # type: ignore[attr-defined]  # of fork_wgmma.py
    tile,
    wgmma_kernel,
)

# Addresses of the scales of a and b; their strides by token, by block of a, by column of b and by block of b
Scales = ctypes.c_char * 32
TYPES = (*[cuda_rtc.TensorMap] * 2, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 3, Scales)


def fits(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Return whether the kernel supports this call; block scales are left to the host."""
    hopper = a.is_cuda and torch.cuda.get_device_capability(a.device)[0] == 9 and nvrtc is not None
    m, k, n = len(a), a.shape[-1], b.shape[1]
    sizes = a.dim() == 2 and 1 <= m <= 64 and n > 0 and k >= 128 and k % 16 == 0
    pitches = a.stride(0), b.stride(1)  # of a token and of a column, in bytes
    dense = a.stride(1) == b.stride(0) == 1 and all(p >= k and p % 16 == 0 for p in pitches)
    aligned = a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    dtypes = a.dtype == b.dtype == FP8 and scale_a.dtype == scale_b.dtype == torch.float32
    scales = scale_a.numel() in (1, m) and scale_b.numel() in (1, n)
    out = out_dtype in (torch.bfloat16, torch.float16) and (bias is None or bias.dtype == out_dtype)
    return hopper and sizes and dense and aligned and dtypes and scales and out


def empty(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=out_dtype)


def product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """In a CUDA graph b is prefetched while the previous kernel still runs, which must not write it."""
    (m, k), n, out = a.shape, b.shape[1], empty(a, b, scale_a, scale_b, out_dtype)
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    sizes = tile(m, n, k // 2, sms, 128, 1024)
    a_map = cuda_rtc.tensor_map(a.data_ptr(), m, k // 2, a.stride(0) // 2, sizes[1])  # words of two numbers
    b_map = cuda_rtc.tensor_map(b.data_ptr(), n, k // 2, b.stride(1) // 2, sizes[0])
    of_a, of_b = scale_a.reshape(-1), scale_b.reshape(-1)
    by_token, by_column = (0 if t.numel() == 1 else t.stride(0) for t in (of_a, of_b))
    scales = struct.pack("2Q4i", of_a.data_ptr(), of_b.data_ptr(), by_token, 0, by_column, 0)
    pointers = [None if bias is None else bias.data_ptr(), out.data_ptr(), None, None]
    kernel = wgmma_kernel(a.device, sizes, "e4m3", out_dtype == torch.bfloat16, 1, TYPES)
    stream, early = torch.cuda.current_stream(a.device).cuda_stream, torch.cuda.is_current_stream_capturing()
    args = [a_map, b_map, *pointers, m, n, k // 2, Scales.from_buffer_copy(scales)]
    kernel.launch(min(-(-n // sizes[0]), sms), 192, stream, args, early)
    return out
