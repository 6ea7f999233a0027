"""Codes of grid cells along space-filling curves: z-order, and Hilbert's curve by Skilling (AIP 707, 381, 2004)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Permutable, Tolerance
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.point.clouds import DEEPEST, depths_of, scan

ORDERS = ("z", "z-trans", "hilbert", "hilbert-trans")  # the rows of the result
CLOUD = 3 * DEEPEST  # the first bit of the cloud's number
INTEGERS = (torch.int32, torch.int64)
_SPREAD = (
    (32, 0x1F00000000FFFF), (16, 0x1F0000FF0000FF), (8, 0x100F00F00F00F00F), (4, 0x10C30C30C30C30C3),
    (2, 0x1249249249249249),
)  # fmt: skip


def reference(grid_coord: torch.Tensor, batch: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """grid_coord: [N, 3] int; batch: [N] int, the cloud of each cell; depths: [clouds] int, at most 16.

    Returns codes [4, N] int64, in the order of ORDERS: z-order, z-order with x and y exchanged, Hilbert's curve, and
    that with x and y exchanged. A code is batch * 2^48 plus the cell's number along the curve through its cloud's cube,
    of 2^depth cells a side. Higher bits of a coordinate are ignored.
    """
    _check(grid_coord, batch, depths)
    depth = depths.long()[batch.long()] if len(batch) else batch.long()
    cells = grid_coord.long() & ((1 << depth) - 1)[:, None]
    turned = cells[:, [1, 0, 2]]
    made = [_interleaved(cells), _interleaved(turned), _hilbert(cells, depth), _hilbert(turned, depth)]
    return torch.stack(made) | (batch.long() << CLOUD)


def _interleaved(cells: torch.Tensor) -> torch.Tensor:
    code = torch.zeros_like(cells[:, 0])
    for bit in range(DEEPEST):
        for axis in range(3):
            code |= (cells[:, axis] >> bit & 1) << (3 * bit + 2 - axis)
    return code


def _hilbert(cells: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    x = list(cells.unbind(1))
    for level in reversed(range(DEEPEST)):
        lower = torch.where(level < depth, (1 << level) - 1, 0)
        for axis in range(3):
            on = (x[axis] >> level & 1).bool()
            swapped = (x[0] ^ x[axis]) & lower
            if axis:
                x[axis] = torch.where(on, x[axis], x[axis] ^ swapped)
                x[0] = torch.where(on, x[0] ^ lower, x[0] ^ swapped)
            else:
                x[0] = torch.where(on, x[0] ^ lower, x[0])
    gray = _interleaved(torch.stack(x, 1))
    code = torch.zeros_like(gray)
    for bit in reversed(range(CLOUD)):  # of a Gray code: each bit is the sum of all higher ones
        above = code >> (bit + 1) & 1
        code |= ((gray >> bit & 1) ^ above) << bit
    return code


def _check(grid_coord: torch.Tensor, batch: torch.Tensor, depths: torch.Tensor) -> None:
    if grid_coord.dim() != 2 or grid_coord.shape[1] != 3 or batch.shape != grid_coord.shape[:1]:
        raise ValueError(
            f"serialize_points: grid_coord must be [N, 3] and batch [N], got {tuple(grid_coord.shape)} and"
            f" {tuple(batch.shape)}"
        )
    if depths.dim() != 1 or any(t.dtype not in INTEGERS for t in (grid_coord, batch, depths)):
        raise ValueError(
            f"serialize_points: depths must be [clouds], and all of int32 or int64, got {tuple(depths.shape)};"
            f" {grid_coord.dtype}, {batch.dtype}, {depths.dtype}"
        )


@triton.jit
def _interleave(x, y, z):
    code = x * 0
    for axis in tl.static_range(3):
        v = x if axis == 0 else (y if axis == 1 else z)
        v = (v | (v << 32)) & 0x1F00000000FFFF
        v = (v | (v << 16)) & 0x1F0000FF0000FF
        v = (v | (v << 8)) & 0x100F00F00F00F00F
        v = (v | (v << 4)) & 0x10C30C30C30C30C3
        v = (v | (v << 2)) & 0x1249249249249249
        code |= v << (2 - axis)
    return code


@triton.jit
def _along_hilbert(x, y, z, depth):
    for step in range(16):
        level = 15 - step
        lower = tl.where(level < depth, (1 << level) - 1, 0).to(tl.int64)
        x = tl.where(((x >> level) & 1) != 0, x ^ lower, x)
        on = ((y >> level) & 1) != 0
        swapped = (x ^ y) & lower
        y = tl.where(on, y, y ^ swapped)
        x = tl.where(on, x ^ lower, x ^ swapped)
        on = ((z >> level) & 1) != 0
        swapped = (x ^ z) & lower
        z = tl.where(on, z, z ^ swapped)
        x = tl.where(on, x ^ lower, x ^ swapped)
    code = _interleave(x, y, z)
    code ^= code >> 1  # each bit becomes the sum of all higher ones
    code ^= code >> 2
    code ^= code >> 4
    code ^= code >> 8
    code ^= code >> 16
    return code ^ (code >> 32)


@triton.jit(do_not_specialize=["N", "CLOUDS"])
def _serialize_kernel(
    coord_ptr, batch_ptr, depths_ptr, out_ptr, N, CLOUDS, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    cloud = tl.load(batch_ptr + at, mask=mask, other=0).to(tl.int64)
    known = mask & (cloud >= 0) & (cloud < CLOUDS)
    depth = tl.load(depths_ptr + cloud, mask=known, other=0).to(tl.int64)
    inside = (depth * 0 + 1 << depth) - 1
    x = tl.load(coord_ptr + at * 3, mask=mask, other=0).to(tl.int64) & inside
    y = tl.load(coord_ptr + at * 3 + 1, mask=mask, other=0).to(tl.int64) & inside
    z = tl.load(coord_ptr + at * 3 + 2, mask=mask, other=0).to(tl.int64) & inside
    high = cloud << 48
    n = N.to(tl.int64)
    tl.store(out_ptr + at, _interleave(x, y, z) | high, mask=mask)
    tl.store(out_ptr + n + at, _interleave(y, x, z) | high, mask=mask)
    tl.store(out_ptr + 2 * n + at, _along_hilbert(x, y, z, depth) | high, mask=mask)
    tl.store(out_ptr + 3 * n + at, _along_hilbert(y, x, z, depth) | high, mask=mask)


def _fake(grid_coord: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty((len(ORDERS), grid_coord.shape[0]), dtype=torch.int64, device=grid_coord.device)


def _triton(grid_coord: torch.Tensor, batch: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    _check(grid_coord, batch, depths)
    out = _fake(grid_coord)
    if not out.numel():
        return out
    given = (t.contiguous() for t in (grid_coord, batch, depths))
    launch_kernel(
        _serialize_kernel,
        (cdiv(len(batch), 256),),
        *given,
        out,
        len(batch),
        len(depths),
        BLOCK=256,
        num_warps=4,
    )
    return out


def by_masks(grid_coord: torch.Tensor, batch: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """The steps of the kernel: interleaved by masks, not bit by bit."""
    _check(grid_coord, batch, depths)
    depth = depths.long()[batch.long()] if len(batch) else batch.long()
    x, y, z = (grid_coord.long() & ((1 << depth) - 1)[:, None]).unbind(1)
    curve = [_spread(a) << 2 | _spread(b) << 1 | _spread(z) for a, b in ((x, y), (y, x))]
    for a, b in ((x, y), (y, x)):
        now = [a, b, z]
        for level in reversed(range(DEEPEST)):
            lower = torch.where(level < depth, (1 << level) - 1, 0)
            for axis in range(3):
                on = (now[axis] >> level & 1).bool()
                swapped = ((now[0] ^ now[axis]) & lower).masked_fill_(on, 0)
                now[axis] = now[axis] ^ swapped
                now[0] = now[0] ^ torch.where(on, lower, swapped)
        code = _spread(now[0]) << 2 | _spread(now[1]) << 1 | _spread(now[2])
        for shift in (1, 2, 4, 8, 16, 32):
            code = code ^ code >> shift
        curve.append(code)
    return torch.stack(curve) | (batch.long() << CLOUD)


def _spread(v: torch.Tensor) -> torch.Tensor:
    for shift, mask in _SPREAD:
        v = (v | v << shift) & mask
    return v


serialize_points = define(
    "serialize_points(Tensor grid_coord, Tensor batch, Tensor depths) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton),
        Provider("torch", by_masks, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    coord, of = scan(call["rows"], call["clouds"], call.generator)
    return {"grid_coord": coord, "batch": of, "depths": depths_of(coord, of, call["clouds"])}


def _case(name: str, tag: str, rows: int, clouds: int = 1, weight: float = 1) -> Case:
    return Case(name, {"rows": rows, "clouds": clouds}, "float32", weight, (tag,))


def _same(args: list[Any]) -> None:
    args[0].zero_()
    args[2].zero_()


def _deepest(args: list[Any]) -> None:
    args[0].fill_((1 << DEEPEST) - 1)
    args[2].fill_(DEEPEST)


SPEC = OpSpec(
    name="serialize_points",
    level=1,
    reference=reference,
    op=serialize_points,
    arguments=(
        Tensor("grid_coord", "rows 3", "int32"),
        Tensor("batch", "rows", "int64"),
        Tensor("depths", "clouds", "int64"),
    ),
    outputs=(Tensor("codes", "4 rows", "int64"),),
    axes={"rows": Axis.per_call(), "clouds": Axis.per_call()},
    constraints=("clouds > 0",),
    values=_values,
    flops="600 * rows",
    cases=(  # Point Transformer V3: a scan of a room at 2 cm, a batch of 8, an object
        _case("room", "model", 120_000, weight=4),
        _case("rooms_8", "model", 800_000, 8),
        _case("object", "model", 2048, weight=4),
        _case("one", "odd", 1),
        _case("odd_63", "odd", 63),
        _case("odd_1000", "odd", 1000, 3),
        _case("odd_1128", "odd", 1128, 2),
        _case("many", "odd", 130, 63),
        _case("few", "odd", 5, 2),
        _case("none", "odd", 0),
    ),
    activations=(),
    permutable=lambda *args: Permutable(rows=(0, 1)),
    extremes={"same": _same, "deepest": _deepest},
    tolerance={"float32": Tolerance(0.0, 0.0)},
    baseline="reference",
)  # fmt: skip
