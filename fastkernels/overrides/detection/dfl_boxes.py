"""Boxes of cells from distributions of the distances to their sides (Li et al., arXiv 2006.04388)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.detection.levels import MOST_LEVELS, cells, padded, pairs, size_of
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

TILE = 1024  # bins of one side in a program
MOST_BINS = 64
T = torch.Tensor
Ints = Sequence[int]


def reference(logits: T, shapes: Ints, strides: Ints, ids: T | None = None) -> T:
    """logits: [B, A, 4 * bins] of A cells. Returns [B, A, 4] float32: left, top, right, bottom in pixels.

    shapes: rows and columns of each level; strides: pixels of a level's cell. The distances from a cell's center to
    the four sides, in cells, are the expectations of the softmax over the bins 0, 1, ... . ids [B, K] int: only the
    boxes of these cells, [B, K, 4]. float64 logits give float64 boxes.
    """
    levels = _check(logits, shapes, strides, ids)
    acc = torch.promote_types(logits.dtype, torch.float32)
    if ids is not None:
        logits = logits.gather(1, ids.long()[:, :, None].expand(-1, -1, logits.shape[2]))
    split = logits.to(acc).unflatten(2, (4, -1))
    distances = split.softmax(-1) @ torch.arange(split.shape[3], dtype=acc, device=logits.device)
    found = []
    for (rows, columns), stride in zip(levels, strides, strict=True):
        y, x = (torch.arange(n, dtype=acc, device=logits.device) + 0.5 for n in (rows, columns))
        places = x.repeat(rows), y.repeat_interleave(columns)
        found.append(torch.stack((*places, torch.full_like(places[0], stride)), -1))
    cell = torch.cat(found)  # [A, 3]
    center, stride_of = (cell[None] if ids is None else cell[ids.long()]).split((2, 1), -1)
    return torch.cat((center - distances[..., :2], center + distances[..., 2:]), -1) * stride_of


def _check(logits: T, shapes: Ints, strides: Ints, ids: T | None) -> list[tuple[int, int]]:
    """(rows, columns) of each level. Raises ValueError."""
    levels = pairs("dfl_boxes", shapes)
    if len(strides) != len(levels) or min(strides) < 1:
        raise ValueError(f"dfl_boxes: {len(levels)} levels need as many strides above 0, got {list(strides)}")
    if logits.dim() != 3 or logits.shape[1] != cells(shapes) or logits.shape[2] % 4 or not logits.shape[2]:
        raise ValueError(
            f"dfl_boxes: logits must be [B, {cells(shapes)}, 4 * bins] for the levels {levels}, got"
            f" {tuple(logits.shape)}"
        )
    if ids is not None and (ids.dim() != 2 or len(ids) != len(logits)):
        raise ValueError(f"dfl_boxes: ids must be [{len(logits)}, K], got {tuple(ids.shape)}")
    return levels


@triton.jit(do_not_specialize=["count", "H0", "W0", "H1", "W1", "H2", "W2", "H3", "W3"])
def _dfl_boxes_kernel(
    x_ptr, ids_ptr, out_ptr, count, x_stride_b, x_stride_a, H0, W0, H1, W1, H2, W2, H3, W3, S0, S1, S2, S3,
    BINS: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_BINS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    image = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    known = rows < count
    cell = rows
    if HAS_IDS:
        cell = tl.load(ids_ptr + image * count + rows, mask=known, other=0).to(tl.int32)
    second = H0 * W0
    third = second + H1 * W1
    level = (
        (cell >= second).to(tl.int32) + (cell >= third).to(tl.int32) + (cell >= third + H2 * W2).to(tl.int32)
    )
    _, columns, start = size_of(level, H0, W0, H1, W1, H2, W2, H3, W3)
    stride = tl.where(level == 0, S0, tl.where(level == 1, S1, tl.where(level == 2, S2, S3))).to(tl.float32)
    center_x = ((cell - start) % columns).to(tl.float32) + 0.5
    center_y = ((cell - start) // columns).to(tl.float32) + 0.5
    bins = tl.arange(0, BLOCK_BINS)
    at = x_ptr + image * x_stride_b + cell.to(tl.int64)[:, None] * x_stride_a + bins[None, :]
    there = known[:, None] & (bins < BINS)[None, :]
    for side in tl.static_range(4):
        x = tl.load(at + side * BINS, mask=there, other=float("-inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, 1)[:, None])
        distance = tl.sum(e * bins.to(tl.float32)[None, :], 1) / tl.sum(e, 1)
        center = center_x if side % 2 == 0 else center_y
        edge = (center - distance if side < 2 else center + distance) * stride
        tl.store(out_ptr + (image * count + rows) * 4 + side, edge, mask=known)


def _fake(logits: T, shapes: Ints, strides: Ints, ids: T | None = None) -> T:
    count = logits.shape[1] if ids is None else ids.shape[1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.empty(logits.shape[0], count, 4, dtype=dtype, device=logits.device)


def _supports_triton(logits: T, shapes: Ints, *_: object) -> str | None:
    if logits.dtype not in FLOATS:
        return f"logits have dtype {logits.dtype}, not float16, bfloat16 or float32"
    if len(shapes) > 2 * MOST_LEVELS or logits.shape[2] > 4 * MOST_BINS:
        return (
            f"{len(shapes) // 2} levels or {logits.shape[2] // 4} bins are over {MOST_LEVELS} or {MOST_BINS}"
        )
    return (
        None if logits.stride(2) == 1 else f"logits have strides {tuple(logits.stride())}: the last must be 1"
    )


def _triton(logits: T, shapes: Ints, strides: Ints, ids: T | None = None) -> T:
    _check(logits, shapes, strides, ids)
    out = _fake(logits, shapes, strides, ids)
    if out.numel() == 0:
        return out
    batch, count, bins = out.shape[0], out.shape[1], logits.shape[2] // 4
    block_bins = max(next_power_of_2(bins), 2)
    block = max(TILE // block_bins, 1)
    launch_kernel(
        _dfl_boxes_kernel, (cdiv(count, block), batch), logits, None if ids is None else ids.contiguous(), out, count,
        *logits.stride()[:2], *padded(shapes), *strides, *[1] * (MOST_LEVELS - len(strides)),
        BINS=bins, HAS_IDS=ids is not None, BLOCK_A=block, BLOCK_BINS=block_bins, num_warps=4,
    )  # fmt: skip
    return out


dfl_boxes = define(
    "dfl_boxes(Tensor logits, int[] shapes, int[] strides, Tensor? ids=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _ids(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Any cells, some of them twice."""
    return (call.rand(*shape) * call["cells"]).to(dtype)


_YOLO, _STRIDES = (80, 80, 40, 40, 20, 20), (8, 16, 32)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, {"bins": 16, "shapes": _YOLO, "strides": _STRIDES, **dims}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="dfl_boxes",
    level=2,
    reference=reference,
    op=dfl_boxes,
    cases=(  # YOLOv10 at 640 px: of 8,400 cells the 300 best
        _case("best_32", "model", batch=32, chosen=True, queries=300),
        _case("best_4", "model", batch=4, chosen=True, queries=300),
        _case("best_1", "model", weight=4, batch=1, chosen=True, queries=300),
        _case("all_1", "model", batch=1),
        _case("one", "odd", "float32", batch=1, bins=1, shapes=(1, 1), strides=(1,)),
        _case("odd_7", "odd", "float32", batch=2, bins=7, shapes=(3, 5, 2, 1), strides=(8, 16)),
        _case("half", "odd", "float16", batch=1, shapes=(8, 4, 4, 2, 2, 1), chosen=True, queries=9),
        _case("four_levels", "odd", batch=3, bins=8, shapes=(8, 8, 4, 4, 2, 2, 1, 1), strides=(4, 8, 16, 32)),
        _case("chosen_63", "odd", "float32", batch=2, bins=17, shapes=(9, 7, 5, 3), strides=(8, 16), chosen=True,
              queries=63),
        _case("chosen_1", "odd", batch=1, shapes=(4, 4), strides=(32,), chosen=True, queries=1),
    ),
    arguments=(
        Tensor("logits", "batch cells 4*bins", bytes="itemsize(dtype)*batch*((queries)if(chosen)else(cells))*4*bins"),
        Scalar("shapes"),
        Scalar("strides"),
        Tensor("ids", "batch queries", "int64", when="chosen", values=_ids),
    ),
    outputs=(Tensor("boxes", {"chosen": "batch queries 4", "": "batch cells 4"}, "float32"),),
    axes={
        "batch": Axis.per_call(),
        "cells": Axis(lambda sizes: cells(sizes["shapes"]), varies=True),
        "bins": Axis.count(),
        "queries": Axis.per_call(0),
        "shapes": Axis(),
        "strides": Axis(),
        "chosen": Axis.option(False),
    },
    flops="6 * batch * ((queries)if(chosen)else(cells)) * 4 * bins",
)  # fmt: skip
