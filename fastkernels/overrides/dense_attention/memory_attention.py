"""Attention of the cells of an image to those of earlier frames and to pointers to an object (SAM 2, arXiv 2408.00714).

Cells are rotated by their places (RoFormer, arXiv 2104.09864), equally in all frames; pointers have no place. The
kernel rotates the keys of all frames by the table of one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS
from fastkernels.overrides.rope.rope_nd import rope_nd

T = torch.Tensor
AT_ONCE = 4096  # elements of a program, unless a row has more


def reference(q: T, k: T, v: T, cos: T, sin: T, pointers: int, scale: float) -> T:
    """q: [B, S, H, D] of S cells; k, v: [B, P + F * S, H, D] of P pointers, and of the cells of F frames.

    cos, sin: [S, D] of the cells, for pairs of channels 2j and 2j + 1; pointers: P. Returns [B, S, H, D] in q's dtype.
    Computed in at least float32.
    """
    _check(q, k, v, cos, sin, pointers)
    acc = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos.to(acc)[:, None], sin.to(acc)[:, None]

    def turn(x: T) -> T:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + other * sin

    keys = k.to(acc)
    cells = turn(keys[:, pointers:].unflatten(1, (-1, q.shape[1]))).flatten(1, 2)
    keys = torch.cat((keys[:, :pointers], cells), 1)
    weights = (torch.einsum("bqhd,bkhd->bhqk", turn(q.to(acc)), keys) * scale).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.to(acc)).to(q.dtype)


def _check(q: T, k: T, v: T, cos: T, sin: T, pointers: int) -> None:
    shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v, cos, sin))
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape or k.shape[0] != q.shape[0]:
        raise ValueError(f"memory_attention: q, k and v must be [B, S, H, D] with one B, got {shapes}")
    _, cells, _, size = q.shape
    if k.shape[2:] != q.shape[2:] or size % 2:
        raise ValueError(f"memory_attention: q, k and v must have the same heads of even size, got {shapes}")
    if cos.shape != (cells, size) or sin.shape != cos.shape:
        raise ValueError(f"memory_attention: cos and sin must be [{cells}, {size}] for q, got {shapes}")
    if not 0 <= pointers < k.shape[1] or (k.shape[1] - pointers) % max(cells, 1):
        raise ValueError(
            f"memory_attention: k must have the {cells} cells of a frame or more behind {pointers} pointers, got"
            f" {shapes}"
        )


@triton.jit(do_not_specialize=["M", "S", "pointers"])
def _turn_frames_kernel(
    k_ptr, cos_ptr, sin_ptr, out_ptr, M, S, pointers, H, D, k_stride_b, k_stride_t, k_stride_h, cos_stride,
    ROWS: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per (block of keys, head, object)
    follow(OVERLAP)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, 2 * HALF)[None, :]
    inside = (rows < M) & (cols < D)
    tokens = rows.to(tl.int64)
    x = tl.load(
        k_ptr + batch * k_stride_b + tokens * k_stride_t + head * k_stride_h + cols, mask=inside, other=0.0
    )
    turned = inside & (rows >= pointers)
    at = tl.where(rows >= pointers, rows - pointers, 0) % S * cos_stride + cols
    cos = tl.load(cos_ptr + at, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + at, mask=turned, other=0.0)
    first, second = tl.split(tl.reshape(x.to(tl.float32), (ROWS, HALF, 2)))
    cos_1, cos_2 = tl.split(tl.reshape(cos.to(tl.float32), (ROWS, HALF, 2)))
    sin_1, sin_2 = tl.split(tl.reshape(sin.to(tl.float32), (ROWS, HALF, 2)))
    y = tl.join(first * cos_1 - second * sin_1, second * cos_2 + first * sin_2)
    out_at = out_ptr + ((batch * M + tokens) * H + head) * D + cols
    tl.store(out_at, tl.reshape(y, (ROWS, 2 * HALF)).to(out_ptr.dtype.element_ty), mask=inside)


def _supports_triton(q: T, k: T, v: T, cos: T, sin: T, pointers: int, scale: float) -> str | None:
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all float16, all bfloat16 or all float32"
    if k.stride(3) != 1 or cos.stride(1) != 1 or sin.stride() != cos.stride():
        return f"k, cos and sin have strides {k.stride()}, {cos.stride()}, {sin.stride()}: the last must be 1"
    if max(k.shape[0], k.shape[2]) > 65535 or k.shape[3] > AT_ONCE:
        return f"{k.shape[2]} heads or {k.shape[0]} objects are over 65535, or its size {k.shape[3]} over {AT_ONCE}"
    return None


def _fake(q: T, *_: object, **__: object) -> T:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _triton(q: T, k: T, v: T, cos: T, sin: T, pointers: int, scale: float) -> T:
    _check(q, k, v, cos, sin, pointers)
    batch, keys, heads, size = k.shape
    turned = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if turned.numel():
        half = next_power_of_2(size) // 2
        rows = max(AT_ONCE // (2 * half), 1)
        launch_kernel(
            _turn_frames_kernel, (cdiv(keys, rows), heads, batch), k, cos, sin, turned, keys, len(cos),
            pointers, heads, size, *k.stride()[:3], cos.stride(0), ROWS=rows, HALF=half, num_warps=4,
        )  # fmt: skip
    return attention_dense(rope_nd(q, cos, sin, False), turned, v, scale)


def _composed(q: T, k: T, v: T, cos: T, sin: T, pointers: int, scale: float) -> T:
    _check(q, k, v, cos, sin, pointers)
    frames = (k.shape[1] - pointers) // len(cos)
    turned = rope_nd(k, cos.repeat(frames, 1), sin.repeat(frames, 1), False)
    return attention_dense(rope_nd(q, cos, sin, False), turned, v, scale)


memory_attention = define(
    "memory_attention(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, int pointers, "
    "float scale) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("composed", _composed, devices=("cuda", "cpu")),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


_SAM3: dict[str, Any] = {"queries": 5184, "heads": 1, "head_size": 256}

SPEC = OpSpec(
    name="memory_attention",
    level=2,
    reference=reference,
    op=memory_attention,
    cases=(  # SAM 3 at 1008 px: one object after 1, 7 and 15 frames, and three objects; a pointer is 4 keys
        _case("sam3_frame_2", "model", batch=1, pointers=4, frames=1, **_SAM3),
        _case("sam3_frame_8", "model", weight=8, batch=1, pointers=28, frames=7, **_SAM3),
        _case("sam3_frame_16", "model", weight=8, batch=1, pointers=60, frames=7, **_SAM3),
        _case("sam3_objects", "model", weight=4, batch=3, pointers=60, frames=7, **_SAM3),
        _case("one", "odd", "float32", batch=1, queries=1, pointers=0, frames=1, heads=1, head_size=2),
        _case("odd_63", "odd", "float32", batch=2, queries=63, pointers=5, frames=2, heads=3, head_size=16),
        _case("half", "odd", "float16", batch=1, queries=49, pointers=8, frames=3, heads=2, head_size=32),
        _case("no_pointers", "odd", "float32", batch=3, queries=16, pointers=0, frames=4, heads=1, head_size=12),
        _case("pairs", "odd", "float32", batch=1, queries=5, pointers=3, frames=7, heads=4, head_size=6),
        _case("wide_half", "odd", "float16", batch=2, queries=33, pointers=1, frames=2, heads=1, head_size=80),
        _case("rough", "odd", batch=2, queries=36, pointers=75, frames=1, heads=2, head_size=64),
    ),
    arguments=(
        Tensor("q", "batch queries heads head_size"),
        Tensor("k", "batch pointers+frames*queries heads head_size"),
        Tensor("v", "batch pointers+frames*queries heads head_size"),
        Tensor("cos", "queries head_size", "float32", std=0.7),
        Tensor("sin", "queries head_size", "float32", std=0.7),
        Scalar("pointers"),
        Scalar("scale"),
    ),
    outputs=(Tensor("out", "batch queries heads head_size"),),
    axes={
        "batch": Axis.per_call(),
        "queries": Axis.count(),
        "pointers": Axis.per_call(),
        "frames": Axis(varies=True),
        "heads": Axis.count(),
        "head_size": Axis.width(),
        "scale": Axis(Expr("head_size ** -0.5")),
    },
    constraints=("head_size % 2 == 0", "frames >= 1", "queries >= 1"),
    flops="4 * batch * queries * (pointers + frames * queries) * heads * head_size",
    activations=("v",),  # the result is linear in the values
    contained="q",
    calls=("attention_dense", "rope_nd"),
)  # fmt: skip
