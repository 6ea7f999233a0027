"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit floats e2m1, and a power of two for each 32 of them along a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed: [..., K / 2] uint8, the first of two values in the low bits; scales: [..., K / 32] uint8 exponents + 127.

    Returns [..., K]. Raises ValueError for shapes that do not match.
    """
    check(packed, scales)
    table = torch.tensor(VALUES, dtype=dtype, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    made = table[codes.int()].unflatten(-1, (-1, BLOCK))
    return torch.ldexp(made, scales.int()[..., None] - 127).to(dtype).flatten(-2)


def check(packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise ValueError unless these are MXFP4 values with their scales."""
    if packed.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"MXFP4 values and scales must be uint8, got {packed.dtype} and {scales.dtype}")
    if packed.shape[:-1] != scales.shape[:-1] or 2 * packed.shape[-1] != BLOCK * scales.shape[-1]:
        raise ValueError(
            f"MXFP4 values of shape {tuple(packed.shape)} and scales of shape {tuple(scales.shape)} do not match: a"
            f" scale belongs to {BLOCK // 2} bytes"
        )


@triton.jit
def decode(packed, scales, ROWS: tl.constexpr, K: tl.constexpr):
    # [ROWS, K / 2] and [ROWS, K / 32] to [ROWS, K] float32. Halves of the magnitude are integers from 0 to 12.
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, K)).to(tl.int32)
    size = codes & 7
    halves = tl.where(size < 2, size, ((2 + (size & 1)) << (size >> 1)) >> 1)
    signed = tl.where(codes > 7, -halves, halves).to(tl.float32) * 0.5
    factor = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, K // 32, 32)), (ROWS, K))
    return signed * factor
