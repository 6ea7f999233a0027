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
def decode(words, scales):
    # Words of four values [ROWS, K / 4] int16 and their scales [ROWS, K / 32] uint8 to four float32 tensors
    # [ROWS, K / 4]: the values of bits 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
    factor = _spread((scales.to(tl.int32) << 23).to(tl.float32, bitcast=True), words, 8)
    wide = words.to(tl.int32)
    return (
        _value(wide) * factor,
        _value(wide >> 4) * factor,
        _value(wide >> 8) * factor,
        _value(wide >> 12) * factor,
    )


@triton.jit
def decode_bfloat16(words, scales):
    # The same in bfloat16 on NVIDIA's chips, divided by RESTORE: bfloat16 holds no factor above 2^127. The three low
    # bits of e2m1 are a bfloat16 when they follow its sign by six zeros: 2^-126 times the value.
    exponent = tl.minimum(scales.to(tl.int32) + 62, 255)  # infinite for scales above 2^65
    factor = _spread((exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True), words, 8)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sign, size;
        shl.b32 sign, $4, 12;  and.b32 sign, sign, 0x80008000;
        shl.b32 size, $4, 6;   lop3.b32 $0, size, 0x01C001C0, sign, 0xEA;  mul.rn.bf16x2 $0, $0, $5;
        shl.b32 sign, $4, 8;   and.b32 sign, sign, 0x80008000;
        shl.b32 size, $4, 2;   lop3.b32 $1, size, 0x01C001C0, sign, 0xEA;  mul.rn.bf16x2 $1, $1, $5;
        shl.b32 sign, $4, 4;   and.b32 sign, sign, 0x80008000;
        shr.b32 size, $4, 2;   lop3.b32 $2, size, 0x01C001C0, sign, 0xEA;  mul.rn.bf16x2 $2, $2, $5;
        and.b32 sign, $4, 0x80008000;
        shr.b32 size, $4, 6;   lop3.b32 $3, size, 0x01C001C0, sign, 0xEA;  mul.rn.bf16x2 $3, $3, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, factor],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


RESTORE = tl.constexpr(2.0**64)


@triton.jit
def _spread(factor, like, EACH: tl.constexpr):
    # [ROWS, K / 32] to the shape of `like`, [ROWS, K / 32 * EACH]
    ROWS: tl.constexpr = like.shape[0]
    COLUMNS: tl.constexpr = like.shape[1]
    return tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, COLUMNS // EACH, EACH)), (ROWS, COLUMNS))


@triton.jit
def _value(codes):
    # The e2m1 values of the four low bits. Halves of the magnitude are integers from 0 to 12.
    size = codes & 7
    halves = tl.where(size < 2, size, ((2 + (size & 1)) << (size >> 1)) >> 1)
    return tl.where((codes & 8) != 0, -halves, halves).to(tl.float32) * 0.5


def by_words(a: torch.Tensor) -> torch.Tensor:
    """[R, K] to [R, K]: columns 0, 4, 8, ..., then 1, 5, 9, ..., 2, ..., 3, ..., as weights are decoded."""
    return a.unflatten(1, (-1, 4)).transpose(1, 2).flatten(1)
