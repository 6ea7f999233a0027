"""Submanifold sparse convolution of occupied grid cells (Graham et al., arXiv 1711.10275), spconv's SubMConv3d."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Tensor, fan_in
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import OpSpec, Tolerance
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.point.clouds import scan
from fastkernels.overrides.point.voxel_neighbors import reference as neighbors_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def reference(
    x: torch.Tensor, weight: torch.Tensor, neighbors: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [N, I]; weight: [O, k, k, k, I], spconv's layout; neighbors: [k^3, N], of voxel_neighbors; bias: [O].

    Returns [N, O] in x's dtype: the sum over all neighbors of a cell of weight[:, i, j, k] x, plus the bias. Computed
    in at least float32.
    """
    _check(x, weight, neighbors, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    padded = torch.cat((x.to(acc), x.new_zeros(1, x.shape[1], dtype=acc)))
    there = (neighbors >= 0) & (neighbors < len(x))
    rows = torch.where(there, neighbors.long(), len(x))
    out = x.new_zeros((len(x), len(weight)), dtype=acc)
    for row, matrix in zip(rows, weight.to(acc).flatten(1, 3).unbind(1), strict=True):
        out = out + padded[row] @ matrix.t()
    return (out if bias is None else out + bias.to(acc)).to(x.dtype)


def _check(x: torch.Tensor, weight: torch.Tensor, neighbors: torch.Tensor, bias: torch.Tensor | None) -> None:
    side = weight.shape[1] if weight.dim() == 5 else 0
    if x.dim() != 2 or weight.shape[1:] != (side, side, side, x.shape[1]):
        raise ValueError(
            f"subm_conv3d: x must be [N, I] and weight [O, k, k, k, I], got {tuple(x.shape)} and"
            f" {tuple(weight.shape)}"
        )
    if neighbors.shape != (side**3, len(x)):
        raise ValueError(
            f"subm_conv3d: neighbors must be [{side**3}, {len(x)}], a row for each weight of the kernel, got"
            f" {tuple(neighbors.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"subm_conv3d: bias must be [{len(weight)}], got {tuple(bias.shape)}")


@triton.jit(do_not_specialize=["N"])
def _conv_kernel(
    x_ptr, w_ptr, neighbor_ptr, bias_ptr, out_ptr, x_stride, N, INNER, OUTER, HAS_BIAS: tl.constexpr,
    KERNEL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A tile of cells: the rows of their neighbors in one direction after the other, times that direction's matrix. A
    # direction in which no cell of the tile has a neighbor costs one load.
    follow(OVERLAP)
    cells = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for way in range(KERNEL):
        place = neighbor_ptr + way * N.to(tl.int64) + cells
        row = tl.load(place, mask=cells < N, other=-1).to(tl.int64)
        there = (row >= 0) & (row < N)
        if tl.max(there.to(tl.int32), 0) > 0:
            for first in range(0, INNER, BLOCK_K):
                inner = first + tl.arange(0, BLOCK_K)
                x_at = x_ptr + row[:, None] * x_stride + inner[None, :]
                x = tl.load(x_at, mask=there[:, None] & (inner < INNER)[None, :], other=0.0)
                w_at = w_ptr + (outs[None, :] * KERNEL + way) * INNER + inner[:, None]
                w = tl.load(w_at, mask=(outs < OUTER)[None, :] & (inner < INNER)[:, None], other=0.0)
                acc = tl.dot(x, w, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outs, mask=outs < OUTER, other=0.0).to(tl.float32)[None, :]
    mask = (cells < N)[:, None] & (outs < OUTER)[None, :]
    tl.store(out_ptr + cells[:, None] * OUTER + outs[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def _fake(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _supports_triton(
    x: torch.Tensor, weight: torch.Tensor, neighbors: torch.Tensor, bias: torch.Tensor | None = None
) -> str | None:
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        return f"x and weight are {x.dtype} and {weight.dtype}, not one of float16, bfloat16 and float32"
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if x.stride(-1) != 1 or not weight.is_contiguous():
        return (
            f"x and weight have strides {tuple(x.stride())} and {tuple(weight.stride())}: x needs contiguous rows,"
            " and weight must be contiguous"
        )
    return None


def _triton(
    x: torch.Tensor, weight: torch.Tensor, neighbors: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    _check(x, weight, neighbors, bias)
    out = _fake(x, weight)
    (count, inner), outer = x.shape, len(weight)
    if not out.numel():
        return out
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    block_m = 64 if count > 4096 else 32
    block_n = min(max(next_power_of_2(outer), 16), 64)
    launch_kernel(
        _conv_kernel, (cdiv(count, block_m), cdiv(outer, block_n)), x, weight, neighbors.contiguous(), bias, out,
        x.stride(0), count, inner, outer, HAS_BIAS=bias is not None, KERNEL=len(neighbors),
        PRECISION="ieee" if exact else "tf32", BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=min(max(next_power_of_2(inner), 16), 64 if x.dtype != torch.float32 else 32), num_warps=4,
    )  # fmt: skip
    return out


def _torch(
    x: torch.Tensor, weight: torch.Tensor, neighbors: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """One product for each direction, of the cells that have a neighbor there."""
    _check(x, weight, neighbors, bias)
    out = x.new_zeros((len(x), len(weight))) if bias is None else bias.to(x.dtype).repeat(len(x), 1)
    there = (neighbors >= 0) & (neighbors < len(x))
    for row, seen, matrix in zip(neighbors, there, weight.flatten(1, 3).unbind(1), strict=True):
        cells = seen.nonzero()[:, 0]
        if len(cells):
            out.index_add_(0, cells, x[row[cells].long()] @ matrix.t())
    return out


def _runs_torch(x: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return None if x.dtype in (torch.float32, torch.float64) else f"PyTorch's CPU kernel adds in {x.dtype}"


subm_conv3d = define(
    "subm_conv3d(Tensor x, Tensor weight, Tensor neighbors, Tensor? bias=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",), supports=_runs_torch),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    coord, of = scan(call["rows"], call["clouds"], call.generator)
    side = call["side"]
    shape = call["outer"], side, side, side, call["inner"]
    weight = call.normal(shape, getattr(torch, call["dtype"]), 0.0, (9 * call["inner"]) ** -0.5)
    return {"neighbors": neighbors_of(coord, of, side), "weight": weight}


def _case(
    name: str,
    tag: str,
    rows: int,
    inner: int,
    outer: int,
    dtype: str = "float16",
    weight: float = 1,
    **more: Any,
) -> Case:
    return Case(name, {"rows": rows, "inner": inner, "outer": outer, **more}, dtype, weight, (tag,))


def _alone(args: list[Any]) -> None:
    args[2].fill_(-1)


def _beyond(args: list[Any]) -> None:
    args[2].view(-1)[::3] = len(args[0])


SPEC = OpSpec(
    name="subm_conv3d",
    level=2,
    reference=reference,
    op=subm_conv3d,
    arguments=(
        Tensor("x", "rows inner"),
        Tensor("weight", "outer side side side inner", values=fan_in),
        Tensor("neighbors", "side**3 rows", "int32"),
        Tensor("bias", "outer", when="biased", std=0.1),
    ),
    outputs=(Tensor("out", "rows outer"),),
    axes={
        "rows": Axis.per_call(), "inner": Axis.width(), "outer": Axis.width(), "side": Axis.option(3),
        "clouds": Axis(1), "biased": Axis.option(True),
        "pairs": Axis.counted(lambda a: int((a.neighbors >= 0).sum()), Expr("side**3 * rows")),
    },
    values=_values,
    flops="2 * pairs * inner * outer",
    cases=(  # Point Transformer V3: the stem, and the first layer of the blocks of each stage
        _case("room_stem", "model", 120_000, 6, 32, side=5, biased=False),
        _case("room_32", "model", 120_000, 32, 32, weight=2),
        _case("room_64", "model", 40_000, 64, 64, weight=4),
        _case("room_256", "model", 4_000, 256, 256, weight=8),
        _case("room_512", "model", 1_200, 512, 512, weight=2),
        _case("room_64_float", "model", 40_000, 64, 64, "float32", 4),
        _case("one", "odd", 1, 1, 1, "float32"),
        _case("odd_63", "odd", 63, 24, 17, "float32"),
        _case("stem", "odd", 40, 6, 16, "float32", side=5, biased=False),
        _case("clouds", "odd", 150, 16, 40, clouds=3),
        _case("odd_bf16", "odd", 33, 32, 32, "bfloat16"),
        _case("wide", "odd", 20, 70, 130, "float32"),
        _case("own", "odd", 31, 20, 12, side=1),
        _case("none", "odd", 0, 16, 16, "float32"),
    ),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5), "float16": Tolerance(4e-3, 4e-3), "bfloat16": Tolerance(3e-2, 3e-2),
    },
    activations=("x",),
    extremes={"alone": _alone, "beyond": _beyond},
    baseline="torch",
)  # fmt: skip
