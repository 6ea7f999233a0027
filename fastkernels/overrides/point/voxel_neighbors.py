"""Neighbors of occupied grid cells, for submanifold sparse convolution (Graham et al., arXiv 1711.10275)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Permutable, Tolerance
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.point.clouds import scan

INTEGERS = (torch.int32, torch.int64)
WIDEST = 15  # cells of a kernel's side
# A key is (cloud, x, y, z), of 12, 17, 17 and 17 bits: coordinates from 0 to 2^16 - 1, and clouds from 0 to 4095
BITS = 17
MARGIN = WIDEST // 2  # is added to coordinates: those of neighbors stay above 0


def reference(grid_coord: torch.Tensor, batch: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """grid_coord: [N, 3] int, 0 to 2^16 - 1; batch: [N] int, the cloud of each cell, 0 to 4095.

    Returns [kernel_size^3, N] int32. Row (i * kernel_size + j) * kernel_size + k has for each cell the number of the
    cell of the same cloud at its coordinates + (i, j, k) - kernel_size // 2, or -1. Of equal cells the first counts.
    kernel_size is odd, and at most 15.
    """
    _check(grid_coord, batch, kernel_size)
    keys, order = _sorted(grid_coord, batch)
    own = _keys(grid_coord, batch)
    found = []
    for step in _steps(kernel_size):
        place = torch.searchsorted(keys, own + step).clamp_(max=max(len(keys) - 1, 0))
        there = keys[place] == own + step
        found.append(torch.where(there, order[place], -1))
    return torch.stack(found).int()


def _steps(kernel_size: int) -> list[int]:
    """The distances between the keys of a cell and its neighbors."""
    around = range(-(kernel_size // 2), kernel_size // 2 + 1)
    return [(i << 2 * BITS) + (j << BITS) + k for i in around for j in around for k in around]


def _keys(grid_coord: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    x, y, z = (grid_coord.long() + MARGIN).unbind(1)
    return ((batch.long() << BITS | x) << BITS | y) << BITS | z


def _sorted(grid_coord: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, order = torch.sort(_keys(grid_coord, batch), stable=True)
    return keys, order


def _check(grid_coord: torch.Tensor, batch: torch.Tensor, kernel_size: int) -> None:
    if grid_coord.dim() != 2 or grid_coord.shape[1] != 3 or batch.shape != grid_coord.shape[:1]:
        raise ValueError(
            f"voxel_neighbors: grid_coord must be [N, 3] and batch [N], got {tuple(grid_coord.shape)} and"
            f" {tuple(batch.shape)}"
        )
    if grid_coord.dtype not in INTEGERS or batch.dtype not in INTEGERS:
        raise ValueError(
            f"voxel_neighbors: grid_coord and batch must be int32 or int64, got {grid_coord.dtype}, {batch.dtype}"
        )
    if kernel_size % 2 != 1 or not 1 <= kernel_size <= WIDEST:
        raise ValueError(f"voxel_neighbors: kernel_size must be odd and at most {WIDEST}, got {kernel_size}")


@triton.jit(do_not_specialize=["N", "STEPS"])
def _neighbors_kernel(
    key_ptr, order_ptr, own_ptr, out_ptr, N, STEPS, SIDE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    # A binary search for each cell's neighbor in one direction. Neighboring programs read neighboring keys.
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    way = tl.program_id(1).to(tl.int64)
    half = SIDE // 2
    step = ((way // (SIDE * SIDE) - half) << 34) + ((way // SIDE % SIDE - half) << 17) + (way % SIDE - half)
    mask = at < N
    want = tl.load(own_ptr + at, mask=mask, other=0) + step
    low = at * 0
    high = low + N
    for _ in range(STEPS):
        middle = (low + high) // 2
        inside = middle < N
        less = inside & (tl.load(key_ptr + middle, mask=inside, other=0) < want)
        low = tl.where(less, middle + 1, low)
        high = tl.where(less, high, middle)
    inside = mask & (low < N)
    there = inside & (tl.load(key_ptr + low, mask=inside, other=-1) == want)
    found = tl.load(order_ptr + low, mask=there, other=-1).to(tl.int32)
    tl.store(out_ptr + way * N + at, tl.where(there, found, -1), mask=mask)


def _fake(grid_coord: torch.Tensor, batch: torch.Tensor, kernel_size: int) -> torch.Tensor:
    return torch.empty((kernel_size**3, grid_coord.shape[0]), dtype=torch.int32, device=grid_coord.device)


def _triton(grid_coord: torch.Tensor, batch: torch.Tensor, kernel_size: int) -> torch.Tensor:
    _check(grid_coord, batch, kernel_size)
    out = _fake(grid_coord, batch, kernel_size)
    count = len(batch)
    if count:
        own = _keys(grid_coord, batch)
        keys, order = torch.sort(own, stable=True)
        launch_kernel(
            _neighbors_kernel, (cdiv(count, 256), kernel_size**3), keys, order, own, out, count, count.bit_length(),
            SIDE=kernel_size, BLOCK=256, num_warps=4,
        )  # fmt: skip
    return out


voxel_neighbors = define(
    "voxel_neighbors(Tensor grid_coord, Tensor batch, int kernel_size) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    coord, of = scan(call["rows"], call["clouds"], call.generator)
    return {"grid_coord": coord, "batch": of}


def _case(name: str, tag: str, rows: int, side: int = 3, clouds: int = 1, weight: float = 1) -> Case:
    return Case(name, {"rows": rows, "clouds": clouds, "kernel_size": side}, "float32", weight, (tag,))


def _same(args: list[Any]) -> None:
    args[0].zero_()


def _largest(args: list[Any]) -> None:
    args[0].fill_((1 << 16) - 1)


SPEC = OpSpec(
    name="voxel_neighbors",
    level=1,
    reference=reference,
    op=voxel_neighbors,
    arguments=(
        Tensor("grid_coord", "rows 3", "int32"),
        Tensor("batch", "rows", "int64"),
        Scalar("kernel_size"),
    ),
    outputs=(Tensor("neighbors", "kernel_size**3 rows", "int32"),),
    axes={
        "rows": Axis.per_call(), "clouds": Axis.per_call(1, read=lambda args: None),
        "kernel_size": Axis.option(choices=(3, 5)),
    },
    constraints=("clouds > 0",),
    values=_values,
    flops="kernel_size**3 * 40 * rows",
    cases=(  # Point Transformer V3: the stem's kernel, and those of blocks
        _case("room_stem", "model", 120_000, 5),
        _case("room", "model", 120_000, weight=4),
        _case("rooms_8", "model", 800_000, 3, 8),
        _case("object", "model", 2048, weight=4),
        _case("one", "odd", 1),
        _case("odd_63", "odd", 63, 3, 2),
        _case("odd_1000", "odd", 1000, 3, 3),
        _case("odd_129", "odd", 129, 5),
        _case("own", "odd", 33, 1),
        _case("many", "odd", 130, 3, 63),
        _case("few", "odd", 5, 3, 2),
        _case("none", "odd", 0),
    ),
    activations=(),
    permutable=lambda *args: Permutable(rows=(0, 1)),
    extremes={"same": _same, "largest": _largest},
    tolerance={"float32": Tolerance(0.0, 0.0)},
    baseline="reference",
)  # fmt: skip
