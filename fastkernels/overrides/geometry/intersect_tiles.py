"""Tiles that projected Gaussians cover, in depth order: the sort of arXiv 2308.04079, section 6."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Permutable
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MOST_INT16 = 32_766  # tiles whose numbers, with one for none, are sorted as int16


def tile_ranges(
    means2d: torch.Tensor, radii: torch.Tensor, tile_size: int, tile_width: int, tile_height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, end) tiles [..., N, 2] int32 in x and y; equal for a Gaussian with a radius of 0."""
    place, size = means2d / tile_size, radii / tile_size
    first, end = (place - size).floor().nan_to_num(0), (place + size).ceil().nan_to_num(0)
    first, end = (  # by scalars: a copy of the limits to a GPU cannot be captured
        torch.stack((t[..., 0].clamp(0, tile_width), t[..., 1].clamp(0, tile_height)), -1).int()
        for t in (first, end)
    )
    there = (radii > 0).all(-1, keepdim=True) & (end > first).all(-1, keepdim=True)
    return first, end.where(there, first)


def tiles_per_gaussian(
    means2d: torch.Tensor, radii: torch.Tensor, tile_size: int, tile_width: int, tile_height: int
) -> torch.Tensor:
    """[..., N] int32."""
    first, end = tile_ranges(means2d, radii, tile_size, tile_width, tile_height)
    return (end - first).prod(-1, dtype=torch.int32)


def reference(
    means2d: torch.Tensor, radii: torch.Tensor, depths: torch.Tensor, tile_size: int, tile_width: int,
    tile_height: int, capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Lists of the Gaussians of each tile, nearest first.

    means2d: [I, N, 2] in pixels; radii: [I, N, 2] int32, as project_gaussians gives them; depths: [I, N]. Returns
    flatten_ids [capacity] int32 and offsets [I * tile_height * tile_width + 1] int32: tile t of all images has the
    Gaussians flatten_ids[offsets[t] : offsets[t + 1]], numbered over the images: image * N + n. Of equal depths the
    smaller number comes first. Behind the last list, ids are -1.

    With more intersections than `capacity`, those of the first images and nearest Gaussians are listed; sum
    tiles_per_gaussian for a capacity that suffices. The shapes do not depend on values: the call can be captured.
    Raises ValueError for shapes that do not fit.
    """
    _check(means2d, radii, depths, tile_size, tile_width, tile_height, capacity)
    images, n = depths.shape
    tiles = tile_width * tile_height
    first, end = tile_ranges(means2d, radii, tile_size, tile_width, tile_height)
    order = depths.sort(dim=-1, stable=True).indices + n * torch.arange(images, device=depths.device)[:, None]
    order, first, end = order.flatten(), first.reshape(-1, 2), end.reshape(-1, 2)
    first, end = first[order].long(), end[order].long()
    counts = (end - first).prod(-1)
    which = torch.repeat_interleave(torch.arange(len(order), device=depths.device), counts)[:capacity]
    rank = torch.arange(len(which), device=depths.device) - (counts.cumsum(0) - counts)[which]
    wide = (end - first)[which, 0]
    tile = (first[which, 1] + rank // wide) * tile_width + first[which, 0] + rank % wide
    tile += order[which] // n * tiles
    sorted_tiles, at = tile.sort(stable=True)
    ids = torch.full((capacity,), -1, dtype=torch.int32, device=depths.device)
    ids[: len(at)] = order[which][at].int()
    bounds = torch.arange(images * tiles + 1, device=depths.device)
    return ids, torch.searchsorted(sorted_tiles, bounds, out_int32=True)


def _check(
    means2d: torch.Tensor, radii: torch.Tensor, depths: torch.Tensor, tile_size: int, tile_width: int,
    tile_height: int, capacity: int,
) -> None:  # fmt: skip
    if depths.dim() != 2 or means2d.shape != (*depths.shape, 2) or radii.shape != means2d.shape:
        raise ValueError(
            f"intersect_tiles: depths must be [I, N], means2d and radii [I, N, 2], got {list(depths.shape)},"
            f" {list(means2d.shape)} and {list(radii.shape)}"
        )
    if min(tile_size, tile_width, tile_height) < 1 or capacity < 0:
        raise ValueError(
            f"intersect_tiles: tile_size {tile_size}, tile_width {tile_width} and tile_height {tile_height} must be at"
            f" least 1, and capacity {capacity} at least 0"
        )
    if len(depths) * tile_width * tile_height >= 2**31 or depths.numel() >= 2**31 or capacity >= 2**31:
        raise ValueError(
            f"intersect_tiles: {len(depths)} images of {tile_width} x {tile_height} tiles, {depths.numel()} Gaussians"
            f" or a capacity of {capacity} are 2^31 or more: render fewer images at once"
        )


@triton.jit(do_not_specialize=["entries", "n", "capacity", "steps", "none"])
def _emit_kernel(
    ends_ptr, order_ptr, first_ptr, end_ptr, tile_ptr, id_ptr, entries, n, tile_width, tiles, capacity, steps, none,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One intersection a thread, found by bisection: Gaussians cover 1 to all tiles, and equal work for each of these
    # would leave most threads idle. Neighbours take the same way through `ends`, and their writes are contiguous.
    follow(OVERLAP)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + entries
    for _ in range(steps):
        mid = (low + high) // 2
        after = tl.load(ends_ptr + mid, mask=low < high, other=0) > slot
        high = tl.where((low < high) & after, mid, high)
        low = tl.where((low < high) & (after == 0), mid + 1, low)
    there = (low < entries) & (slot < capacity)
    begin = tl.load(ends_ptr + low - 1, mask=there & (low > 0), other=0)
    g = tl.load(order_ptr + low, mask=there, other=0)
    x0 = tl.load(first_ptr + g * 2, mask=there, other=0)
    y0 = tl.load(first_ptr + g * 2 + 1, mask=there, other=0)
    x1 = tl.load(end_ptr + g * 2, mask=there, other=1)
    rank = (slot - begin).to(tl.int32)
    wide = tl.maximum(x1 - x0, 1)
    tile = (g // n).to(tl.int32) * tiles + (y0 + rank // wide) * tile_width + x0 + rank % wide
    tl.store(tile_ptr + slot, tl.where(there, tile, none).to(tile_ptr.dtype.element_ty), mask=slot < capacity)
    tl.store(id_ptr + slot, tl.where(there, g.to(tl.int32), -1), mask=slot < capacity)


def _fake(
    means2d: torch.Tensor, radii: Any, depths: torch.Tensor, tile_size: Any, tile_width: Any, tile_height: Any,
    capacity: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    bounds = depths.shape[0] * tile_width * tile_height + 1
    return (
        means2d.new_empty(capacity, dtype=torch.int32),
        means2d.new_empty(bounds, dtype=torch.int32),
    )


def _triton(
    means2d: torch.Tensor, radii: torch.Tensor, depths: torch.Tensor, tile_size: int, tile_width: int,
    tile_height: int, capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Two small sorts in place of one of 64-bit keys: depths of the Gaussians, then tile numbers of the intersections.

    The second is stable, and its keys have 16 bits at up to 32,766 tiles: a radix sort of the large array has two
    passes in place of six.
    """
    _check(means2d, radii, depths, tile_size, tile_width, tile_height, capacity)
    images, n = depths.shape
    tiles, device = tile_width * tile_height, depths.device
    bounds = torch.arange(images * tiles + 1, device=device, dtype=torch.int32)
    if not capacity or not depths.numel():
        return means2d.new_full((capacity,), -1, dtype=torch.int32), torch.zeros_like(bounds)
    first, end = tile_ranges(means2d, radii, tile_size, tile_width, tile_height)
    counts = (end - first).prod(-1, dtype=torch.int64)
    order = depths.sort(dim=-1, stable=True).indices
    counts = counts.gather(1, order).flatten()
    order = (order + n * torch.arange(images, device=device)[:, None]).flatten()
    ends = counts.cumsum(0)
    kind = torch.int16 if images * tiles <= MOST_INT16 else torch.int32
    tile = torch.empty(capacity, dtype=kind, device=device)
    ids = torch.empty(capacity, dtype=torch.int32, device=device)
    launch_kernel(
        _emit_kernel, (cdiv(capacity, 256),), ends, order, first.contiguous(), end.contiguous(), tile, ids, len(order),
        n, tile_width, tiles, capacity, len(order).bit_length() + 1, images * tiles, BLOCK=256, num_warps=4,
    )  # fmt: skip
    tile, at = tile.sort(stable=True)
    return ids[at], torch.searchsorted(tile.int(), bounds, out_int32=True)


intersect_tiles = define(
    "intersect_tiles(Tensor means2d, Tensor radii, Tensor depths, SymInt tile_size, SymInt tile_width,"
    " SymInt tile_height, SymInt capacity) -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Log-normal radii of a few pixels, some Gaussians unseen; rectangles do not end at the border of a tile."""
    shape = call["images"], call["gaussians"]
    size, wide, tall = call["tile_size"], call["tile_width"], call["tile_height"]
    radii = (1.2 + 0.8 * call.randn(*shape, 2)).exp().ceil().clamp(1, 4 * size).int()
    radii = radii.where((call.rand(*shape) < 0.8)[..., None], 0)
    place = call.rand(*shape, 2) * 1.2 - 0.1
    extent = torch.tensor([wide * size, tall * size], dtype=torch.float32, device=call.device)
    means = (place * extent).floor() + 0.25 + 0.5 * call.rand(*shape, 2)
    return {"means2d": means, "radii": radii, "depths": 0.5 + 4 * call.rand(*shape)}


def _case(
    name: str, tag: str, images: int, gaussians: int, wide: int, tall: int, capacity: int, **more: Any
) -> Case:
    dims = {
        "images": images,
        "gaussians": gaussians,
        "tile_width": wide,
        "tile_height": tall,
        "capacity": capacity,
    }
    weight = more.pop("weight", 1)
    return Case(name, dims | more, "float32", weight, (tag,))


SPEC = OpSpec(
    name="intersect_tiles",
    level=2,
    reference=reference,
    op=intersect_tiles,
    arguments=(
        Tensor("means2d", "images gaussians 2"),
        Tensor("radii", "images gaussians 2", "int32"),
        Tensor("depths", "images gaussians"),
        Scalar("tile_size", default=16),
        Scalar("tile_width"),
        Scalar("tile_height"),
        Scalar("capacity"),
    ),
    outputs=(
        Tensor("flatten_ids", "capacity", "int32"),
        Tensor("offsets", "images*tile_width*tile_height+1", "int32"),
    ),
    axes={
        "images": Axis.per_call(), "gaussians": Axis.count(), "tile_width": Axis.per_call(),
        "tile_height": Axis.per_call(), "capacity": Axis.per_call(),
    },
    values=_values,
    flops="20 * capacity",
    cases=(
        _case("million_1080p", "model", 1, 1_000_000, 120, 68, 10_000_000, weight=8),
        _case("million_4_views", "model", 4, 1_000_000, 120, 68, 40_000_000, weight=4),
        _case("outdoor_1080p", "model", 1, 6_000_000, 120, 68, 30_000_000),
        _case("one", "odd", 1, 1, 1, 1, 1),
        _case("odd_63", "odd", 1, 63, 5, 3, 500),
        _case("odd_1000", "odd", 2, 1000, 7, 4, 10_000),
        _case("odd_1128", "odd", 1, 1128, 31, 2, 9_001),
        _case("too_many", "odd", 2, 129, 6, 6, 100),
        _case("small_tiles", "odd", 3, 65, 9, 8, 3_000, tile_size=4),
        _case("many_tiles", "odd", 1, 100, 300, 120, 2_000),
        _case("none", "odd", 2, 0, 3, 3, 8),
        _case("no_room", "odd", 1, 9, 3, 3, 0),
    ),
    tie_sensitive=True,
    permutable=lambda *args: Permutable(),
    activations=("depths",),
    baseline="reference",
)  # fmt: skip
