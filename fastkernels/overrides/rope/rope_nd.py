"""Rotary positions in two and three dimensions: a row of cosines and sines for each patch, none for prefix tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

AT_ONCE = 1024  # elements of a program, unless a head has more


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
    """x: [B, S, H, D]; cos, sin: [P, D] of the last P tokens; the S - P tokens before them stay as they are.

    halves: channel j pairs with j + D / 2, otherwise 2j with 2j + 1. The channels of a pair can have different angles.
    Computed in at least float32, rounded once; returns [B, S, H, D] in x's dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    prefix = x.shape[1] - len(cos)
    h = x[:, prefix:].to(acc)
    if halves:
        first, second = h.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-h[..., 1::2], h[..., ::2]), dim=-1).flatten(-2)
    y = h * cos.to(acc)[:, None] + turned * sin.to(acc)[:, None]
    return torch.cat((x[:, :prefix], y.to(x.dtype)), dim=1)


@triton.jit
def _pairs(row, pair, mask, HALF, ROWS: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr):
    # The two numbers of each pair of rows [ROWS, 1]
    if HALVES:
        first = tl.load(row + pair, mask=mask & (pair < HALF), other=0.0)
        second = tl.load(row + HALF + pair, mask=mask & (pair < HALF), other=0.0)
    else:
        # Both are in one thread: loads of single neighbors would take a memory instruction each.
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(row + cols, mask=mask & (cols < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(both, (ROWS, BLOCK, 2)))
    return first, second


@triton.jit(do_not_specialize=["S", "prefix"])
def _rope_nd_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, S, prefix, H, HALF, x_b, x_t, x_h, cos_p, sin_p,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // S, row % S
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = heads < H
    x = x_ptr + batch * x_b + token * x_t + heads * x_h
    a, b = _pairs(x, pair, mask, HALF, HEADS, BLOCK, HALVES)
    if token >= prefix:
        one = tl.zeros((1, 1), tl.int64)
        cos_a, cos_b = _pairs(
            cos_ptr + (token - prefix) * cos_p + one, pair, one == 0, HALF, 1, BLOCK, HALVES
        )
        sin_a, sin_b = _pairs(
            sin_ptr + (token - prefix) * sin_p + one, pair, one == 0, HALF, 1, BLOCK, HALVES
        )
        p, q = a.to(tl.float32), b.to(tl.float32)
        a = (p * cos_a.to(tl.float32) - q * sin_a.to(tl.float32)).to(a.dtype)
        b = (q * cos_b.to(tl.float32) + p * sin_b.to(tl.float32)).to(b.dtype)
    out = out_ptr + (row * H + heads) * (2 * HALF)
    if HALVES:
        tl.store(out + pair, a, mask=mask & (pair < HALF))
        tl.store(out + HALF + pair, b, mask=mask & (pair < HALF))
    else:
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(out + cols, tl.reshape(tl.join(a, b), (HEADS, 2 * BLOCK)), mask=mask & (cols < 2 * HALF))


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    shape, size = tuple(x.shape), tuple(cos.shape)
    if x.dim() != 4 or shape[3] % 2:
        raise ValueError(f"rope_nd: x must be [B, S, H, D] with an even D, got {shape}")
    if cos.shape != sin.shape or cos.dim() != 2 or size[1] != shape[3] or size[0] > shape[1]:
        raise ValueError(f"rope_nd: cos {size} and sin {tuple(sin.shape)} are not [P, D] of x {shape}")


def _supports_triton(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> str | None:
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        if t.dtype not in FLOATS or t.stride(-1) != 1:
            return (
                f"{name} has dtype {t.dtype} and strides {tuple(t.stride())}: a float dtype, rows contiguous"
            )
    return f"head size {x.shape[-1]} is over 2048" if x.shape[-1] > 2048 else None


def _triton(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
    _check(x, cos, sin)
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    batch, tokens, heads, size = x.shape
    block = next_power_of_2(size // 2)
    at_once = min(max(AT_ONCE // (2 * block), 1), next_power_of_2(heads))
    launch_kernel(
        _rope_nd_kernel, (batch * tokens, cdiv(heads, at_once)),
        x, cos, sin, out, tokens, tokens - len(cos), heads, size // 2, *x.stride()[:3], cos.stride(0), sin.stride(0),
        HEADS=at_once, BLOCK=block, HALVES=halves, num_warps=4,
    )  # fmt: skip
    return out


def _reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
    _check(x, cos, sin)
    return reference(x, cos, sin, halves).contiguous()


rope_nd = define(
    "rope_nd(Tensor x, Tensor cos, Tensor sin, bool halves) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, batch: int, tokens: int, positions: int, heads: int, head_size: int,
          dtype: str = "bfloat16", weight: float = 1, halves: bool = True, table: str = "float32") -> Case:  # fmt: skip
    dims = {"batch": batch, "tokens": tokens, "positions": positions, "heads": heads, "head_size": head_size}
    return Case(name, {**dims, "halves": halves, "table": table}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="rope_nd",
    level=1,
    reference=reference,
    op=rope_nd,
    cases=(  # queries and keys of DINOv3 7B at 256 px, and V-JEPA 2 (ViT-L, 64 frames) by axis and whole
        _case("dinov3_7b", "model", 1, 261, 256, 32, 128, weight=80, table="bfloat16"),
        _case("vjepa2", "model", 1, 8192, 8192, 16, 20, weight=144, halves=False, table="bfloat16"),
        _case("vjepa2_heads", "model", 1, 8192, 8192, 16, 64, weight=48, halves=False, table="bfloat16"),
        _case("one", "odd", 1, 1, 1, 1, 2, "float32"),
        _case("prefix_only", "odd", 2, 3, 0, 2, 4),
        _case("odd_63", "odd", 2, 63, 58, 3, 40),
        _case("pairs", "odd", 3, 7, 2, 5, 24, "float16", halves=False),
        _case("wide", "odd", 1, 5, 3, 33, 64, "float16", table="float16"),
        _case("pairs_wide", "odd", 2, 17, 16, 3, 128, halves=False),
        _case("pairs_63", "odd", 1, 63, 63, 9, 72, "float32", halves=False),
    ),
    arguments=(
        Tensor("x", "batch tokens heads head_size"),
        Tensor("cos", "positions head_size", "table", std=0.7),
        Tensor("sin", "positions head_size", "table", std=0.7),
        Scalar("halves"),
    ),
    outputs=(Tensor("out", "batch tokens heads head_size"),),
    axes={
        "batch": Axis.per_call(),
        "tokens": Axis.per_call(),
        "positions": Axis.per_call(),
        "heads": Axis.count(),
        "head_size": Axis.width(),
        "halves": Axis.option(True, stated=True),
        "table": Axis.dtype("float32"),
    },
    constraints=("head_size % 2 == 0", "positions <= tokens"),
    flops="3 * batch * positions * heads * head_size",
    batch_invariant=True,  # elementwise
)
