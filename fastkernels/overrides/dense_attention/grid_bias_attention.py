"""Attention of queries to the cells of an image, with a bias for each row and one for each column of cells.

The bias of a cell is the sum of both, as in the decoders of Plain-DETR (arXiv 2308.01904) and SAM 3. The kernel adds
them where it computes the scores: the table of all queries and cells is never in memory.
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

T = torch.Tensor
PROGRAMS = 128  # with fewer, a block has fewer queries


def reference(q: T, k: T, v: T, row_bias: T, column_bias: T, scale: float) -> T:
    """q: [B, Sq, H, D]; k, v: [B, rows * columns, H, D] of cells, row by row. Returns [B, Sq, H, D] in q's dtype.

    row_bias: [B, H, Q, rows]; column_bias: [B, H, Q, columns], both added to the scaled products of the last Q queries.
    Computed in at least float32.
    """
    _check(q, k, v, row_bias, column_bias)
    acc = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(acc), k.to(acc)) * scale
    weights = (scores + _table(q, row_bias.to(acc), column_bias.to(acc))).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.to(acc)).to(q.dtype)


def _table(q: T, row_bias: T, column_bias: T) -> T:
    """The biases of all queries and cells [B, H, Sq, rows * columns]."""
    table = (row_bias[..., :, None] + column_bias[..., None, :]).flatten(3)
    return torch.nn.functional.pad(table, (0, 0, q.shape[1] - table.shape[2], 0))


def _check(q: T, k: T, v: T, row_bias: T, column_bias: T) -> None:
    shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v, row_bias, column_bias))
    if any(t.dim() != 4 for t in (q, k, v, row_bias, column_bias)):
        raise ValueError(f"grid_bias_attention: all tensors must have four dimensions, got {shapes}")
    batch, queries, heads, size = q.shape
    wanted = (batch, row_bias.shape[3] * column_bias.shape[3], heads, size)
    if k.shape != wanted or v.shape != wanted:
        raise ValueError(f"grid_bias_attention: k and v must be {wanted} for q and the biases, got {shapes}")
    for bias in (row_bias, column_bias):
        if bias.shape[:2] != (batch, heads) or bias.shape[2] > queries or bias.shape[2] != row_bias.shape[2]:
            raise ValueError(
                f"grid_bias_attention: row_bias must be [{batch}, {heads}, Q, rows] and column_bias [{batch}, {heads},"
                f" Q, columns] with at most {queries} queries, got {shapes}"
            )


@triton.jit(do_not_specialize=["n_q", "n_k", "prefix", "COLUMNS"])
def _grid_bias_attention_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, columns_ptr, out_ptr, n_q, n_k, prefix, COLUMNS, H, D, scale, q_stride_b, q_stride_t,
    q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, r_stride_b, r_stride_h,
    r_stride_q, c_stride_b, c_stride_h, c_stride_q, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per (block of queries, head, image). The biases of a block of queries stay in the L1 cache.
    follow(OVERLAP)
    LOG2E: tl.constexpr = 1.4426950408889634
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = rows.to(tl.int64)[:, None]
    q_mask = (rows < n_q)[:, None] & (dims < D)[None, :]
    q_at = q_ptr + batch * q_stride_b + head * q_stride_h + tokens * q_stride_t
    q = tl.load(q_at + dims[None, :], mask=q_mask, other=0.0)
    k_at, v_at = (
        k_ptr + batch * k_stride_b + head * k_stride_h,
        v_ptr + batch * v_stride_b + head * v_stride_h,
    )
    biased = ((rows >= prefix) & (rows < n_q))[:, None]
    of_row = rows_ptr + batch * r_stride_b + head * r_stride_h + (tokens - prefix) * r_stride_q
    of_column = columns_ptr + batch * c_stride_b + head * c_stride_h + (tokens - prefix) * c_stride_q
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(0, n_k, BLOCK_N):
        cells = begin + tl.arange(0, BLOCK_N)
        inside = cells < n_k
        kv_mask = inside[:, None] & (dims < D)[None, :]
        keys = cells.to(tl.int64)[:, None]
        k = tl.load(k_at + keys * k_stride_t + dims[None, :], mask=kv_mask, other=0.0)
        there = biased & inside[None, :]
        bias = tl.load(of_row + (cells // COLUMNS)[None, :], mask=there, other=0.0).to(tl.float32)
        bias += tl.load(of_column + (cells % COLUMNS)[None, :], mask=there, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) + bias * LOG2E
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        v = tl.load(v_at + keys * v_stride_t + dims[None, :], mask=kv_mask, other=0.0)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    out_at = out_ptr + ((batch * n_q + tokens) * H + head) * D + dims[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)


def _supports_triton(q: T, k: T, v: T, row_bias: T, column_bias: T, scale: float) -> str | None:
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all float16, all bfloat16 or all float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if q.shape[3] > 256 or max(q.shape[0], q.shape[2]) > 65535:
        return (
            f"head size {q.shape[3]} is over 256, or {q.shape[2]} heads or {q.shape[0]} images are over 65535"
        )
    for name, t in (("q", q), ("k", k), ("v", v), ("row_bias", row_bias), ("column_bias", column_bias)):
        if t.stride(3) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last must be 1"
    if row_bias.dtype not in FLOATS or column_bias.dtype not in FLOATS:
        return f"biases have dtypes {row_bias.dtype}, {column_bias.dtype}, not float16, bfloat16 or float32"
    return None


def _fake(q: T, *_: object, **__: object) -> T:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _triton(q: T, k: T, v: T, row_bias: T, column_bias: T, scale: float) -> T:
    _check(q, k, v, row_bias, column_bias)
    out = _fake(q)
    if out.numel() == 0:
        return out
    batch, queries, heads, size = q.shape
    single, block_d = q.dtype == torch.float32, max(next_power_of_2(size), 16)
    block_m = 64
    while block_m > 16 and cdiv(queries, block_m) * heads * batch < PROGRAMS:
        block_m //= 2
    exact = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch_kernel(
        _grid_bias_attention_kernel, (cdiv(queries, block_m), heads, batch), q, k, v, row_bias, column_bias, out,
        queries, k.shape[1], queries - row_bias.shape[2], column_bias.shape[3], heads, size, scale, *q.stride()[:3],
        *k.stride()[:3], *v.stride()[:3], *row_bias.stride()[:3], *column_bias.stride()[:3],
        PRECISION=exact if single else "tf32", BLOCK_M=block_m, BLOCK_N=32 if block_d >= 256 or single else 64,
        BLOCK_D=block_d, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def _dense(q: T, k: T, v: T, row_bias: T, column_bias: T, scale: float) -> T:
    _check(q, k, v, row_bias, column_bias)
    return attention_dense(q, k, v, scale, _table(q, row_bias, column_bias).to(q.dtype))


grid_bias_attention = define(
    "grid_bias_attention(Tensor q, Tensor k, Tensor v, Tensor row_bias, Tensor column_bias, float scale) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("dense", _dense, devices=("cuda", "cpu")),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


_SAM3: dict[str, Any] = {
    "queries": 201,
    "biased": 200,
    "heads": 8,
    "rows": 72,
    "columns": 72,
    "head_size": 32,
}

SPEC = OpSpec(
    name="grid_bias_attention",
    level=2,
    reference=reference,
    op=grid_bias_attention,
    cases=(  # SAM 3 at 1008 px: a token for presence and 200 queries in six decoder layers
        _case("sam3_4", "model", weight=6, batch=4, **_SAM3),
        _case("sam3_1", "model", weight=6, batch=1, **_SAM3),
        _case("one", "odd", "float32", batch=1, queries=1, biased=1, heads=1, rows=1, columns=1, head_size=1),
        _case("odd_63", "odd", "float32", batch=2, queries=9, biased=8, heads=3, rows=7, columns=9, head_size=16),
        _case("half", "odd", "float16", batch=1, queries=21, biased=20, heads=2, rows=5, columns=13, head_size=32),
        _case("none", "odd", "float32", batch=1, queries=5, biased=0, heads=2, rows=3, columns=4, head_size=8),
        _case("all", "odd", "float32", batch=2, queries=17, biased=17, heads=2, rows=12, columns=11, head_size=33),
        _case("rough", "odd", batch=1, queries=7, biased=5, heads=4, rows=8, columns=8, head_size=16),
        _case("line", "odd", "float16", batch=3, queries=4, biased=2, heads=1, rows=1, columns=65, head_size=72),
    ),
    arguments=(
        Tensor("q", "batch queries heads head_size"),
        Tensor("k", "batch rows*columns heads head_size"),
        Tensor("v", "batch rows*columns heads head_size"),
        Tensor("row_bias", "batch heads biased rows"),
        Tensor("column_bias", "batch heads biased columns"),
        Scalar("scale"),
    ),
    outputs=(Tensor("out", "batch queries heads head_size"),),
    axes={
        "batch": Axis.per_call(),
        "queries": Axis.count(),
        "biased": Axis.count(),
        "heads": Axis.count(),
        "rows": Axis(),
        "columns": Axis(),
        "head_size": Axis.width(),
        "scale": Axis(Expr("head_size ** -0.5")),
    },
    constraints=("biased <= queries",),
    flops="4 * batch * queries * rows * columns * heads * head_size",
    activations=("v",),  # the result is linear in the values
    contained="q",
    bounded=("row_bias", "column_bias"),  # rounded to the queries' dtype, in which attention takes their sum
    calls=("attention_dense",),
)  # fmt: skip
