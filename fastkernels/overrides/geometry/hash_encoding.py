"""Multi-resolution hash encoding: Mueller et al., arXiv 2201.05989, with the grids of tiny-cuda-nn."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import TOLERANCE, Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor, uniform
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Permutable
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

PRIMES = (1, 2_654_435_761, 805_459_861)
MOST_FEATURES = 8


def levels_of(
    levels: int, base_resolution: int, per_level_scale: float, log2_hashmap_size: int
) -> list[tuple[float, int, int, int]]:
    """(scale, resolution, first row, rows) of each level's grid in the table.

    A level has a row for each vertex, rounded up to 8, while these are at most 2 ** log2_hashmap_size. Positions in the
    grid are x * scale + 0.5.
    """
    made, first = [], 0
    for level in range(levels):
        scale = 2.0 ** (level * math.log2(per_level_scale)) * base_resolution - 1.0
        resolution = math.ceil(scale) + 1
        rows = min(cdiv(resolution**3, 8) * 8, 1 << log2_hashmap_size)
        made.append((scale, resolution, first, rows))
        first += rows
    return made


def table_rows(levels: int, base_resolution: int, per_level_scale: float, log2_hashmap_size: int) -> int:
    """The rows of the table of all levels."""
    *_, (_, _, first, rows) = levels_of(levels, base_resolution, per_level_scale, log2_hashmap_size)
    return first + rows


def reference(
    x: torch.Tensor, table: torch.Tensor, levels: int, base_resolution: int, per_level_scale: float,
    log2_hashmap_size: int,
) -> torch.Tensor:  # fmt: skip
    """x: [N, 3] from 0 to 1; table: [table_rows(...), F]. Returns [N, levels * F] in table's dtype, level by level.

    Each level adds up the rows of the 8 vertices around x, by trilinear weights. The row of a vertex is its number in
    the grid while there are as many rows, else the hash (x * p0) ^ (y * p1) ^ (z * p2), modulo the number of rows. The
    result is transposed in memory: the values of one feature are contiguous. Raises ValueError for shapes that do not
    fit.
    """
    grids = _check(x, table, levels, base_resolution, per_level_scale, log2_hashmap_size)
    acc = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(
        levels, table.shape[1], len(x), dtype=torch.promote_types(table.dtype, acc), device=x.device
    )
    for level, (scale, resolution, first, rows) in enumerate(grids):
        place = x.to(acc) * scale + 0.5
        corner = place.floor()
        near = place - corner
        values = torch.zeros_like(out[level])
        for vertex in range(8):
            at = [(vertex >> d) & 1 for d in range(3)]
            weight = torch.stack([near[:, d] if at[d] else 1 - near[:, d] for d in range(3)]).prod(0)
            cell = [(corner[:, d].long() + at[d]) & 0xFFFFFFFF for d in range(3)]
            if resolution**3 <= rows:
                row = cell[0] + resolution * (cell[1] + resolution * cell[2])
            else:
                row = cell[0] ^ (cell[1] * PRIMES[1]) ^ (cell[2] * PRIMES[2])
            values += weight * table[first + (row & 0xFFFFFFFF) % rows].t().to(out.dtype)
        out[level] = values
    return out.view(levels * table.shape[1], len(x)).to(table.dtype).t()


def _check(x: torch.Tensor, table: torch.Tensor, *grid: Any) -> list[tuple[float, int, int, int]]:
    levels, base, factor, log2 = grid
    if levels < 1 or base < 1 or factor < 1 or not 3 <= log2 <= 30:
        raise ValueError(
            f"hash_encoding: levels {levels}, base_resolution {base} and per_level_scale {factor} must be at least 1,"
            f" and log2_hashmap_size {log2} from 3 to 30"
        )
    grids = levels_of(*grid)
    rows = grids[-1][2] + grids[-1][3]
    if x.dim() != 2 or x.shape[1] != 3 or table.dim() != 2 or table.shape[0] != rows:
        raise ValueError(
            f"hash_encoding: x must be [N, 3] and table [{rows}, F], got {list(x.shape)} and {list(table.shape)}"
        )
    return grids


@triton.jit(do_not_specialize=["N"])
def _hash_kernel(
    x_ptr,
    table_ptr,
    out_ptr,
    levels_ptr,
    scales_ptr,
    N,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Programs of one level run together, so that its table stays in the L2 cache.
    follow(OVERLAP)
    level = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    scale = tl.load(scales_ptr + level)
    resolution = tl.load(levels_ptr + level * 3).to(tl.uint32)
    first = tl.load(levels_ptr + level * 3 + 1).to(tl.int64)
    rows = tl.load(levels_ptr + level * 3 + 2).to(tl.uint32)
    dense = (
        tl.load(levels_ptr + level * 3 + 2)
        >= tl.load(levels_ptr + level * 3).to(tl.int64) * resolution * resolution
    )
    x = tl.load(x_ptr + i * 3, mask=here, other=0.0) * scale + 0.5
    y = tl.load(x_ptr + i * 3 + 1, mask=here, other=0.0) * scale + 0.5
    z = tl.load(x_ptr + i * 3 + 2, mask=here, other=0.0) * scale + 0.5
    fx, fy, fz = tl.floor(x), tl.floor(y), tl.floor(z)
    x, y, z = x - fx, y - fy, z - fz
    cx, cy, cz = fx.to(tl.int32).to(tl.uint32), fy.to(tl.int32).to(tl.uint32), fz.to(tl.int32).to(tl.uint32)
    features = tl.arange(0, F)
    acc = tl.zeros([F, BLOCK], tl.float32)
    for vertex in tl.static_range(8):
        dx, dy, dz = vertex & 1, (vertex >> 1) & 1, vertex >> 2
        weight = (x if dx == 1 else 1.0 - x) * (y if dy == 1 else 1.0 - y) * (z if dz == 1 else 1.0 - z)
        vx, vy, vz = cx + dx, cy + dy, cz + dz
        row = tl.where(
            dense, vx + resolution * (vy + resolution * vz), vx ^ (vy * 2654435761) ^ (vz * 805459861)
        )
        row = row.to(tl.uint32) % rows
        at = table_ptr + (first + row.to(tl.int64))[None, :] * F + features[:, None]
        acc += weight[None, :] * tl.load(at, mask=here[None, :], other=0.0).to(tl.float32)
    out = out_ptr + (level * F + features).to(tl.int64)[:, None] * N + i[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=here[None, :])


def _fake(x: torch.Tensor, table: torch.Tensor, levels: Any, *_: Any) -> torch.Tensor:
    return table.new_empty(levels * table.shape[1], x.shape[0]).t()


def _supports_triton(x: torch.Tensor, table: torch.Tensor, levels: int, *_: Any, **__: Any) -> str | None:
    if x.dtype != torch.float32 or table.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return (
            f"the kernel is for float32 positions and tables up to float32, not {x.dtype} and {table.dtype}"
        )
    f = table.shape[1]
    if f > MOST_FEATURES or f & (f - 1):
        return f"the kernel has 1, 2, 4 or 8 features a level, not {f}"
    return None


def _triton(
    x: torch.Tensor, table: torch.Tensor, levels: int, base_resolution: int, per_level_scale: float,
    log2_hashmap_size: int,
) -> torch.Tensor:  # fmt: skip
    grids = _check(x, table, levels, base_resolution, per_level_scale, log2_hashmap_size)
    out = _fake(x, table, levels)
    if len(x):
        numbers, scales = _on_device(tuple(grids), x.device)
        launch_kernel(
            _hash_kernel, (cdiv(len(x), 256), levels), x.contiguous(), table.contiguous(), out.t(), numbers, scales,
            len(x), F=table.shape[1], BLOCK=256, num_warps=4,
        )  # fmt: skip
    return out


_placed: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}


def _on_device(grids: tuple[Any, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(resolution, first row, rows) [L, 3] int64 and scales [L] of the levels, copied to the device once."""
    key = grids, device
    if key not in _placed:
        numbers = torch.tensor([g[1:] for g in grids], dtype=torch.int64, device=device)
        _placed[key] = numbers, torch.tensor([g[0] for g in grids], dtype=torch.float32, device=device)
    return _placed[key]


hash_encoding = define(
    "hash_encoding(Tensor x, Tensor table, SymInt levels, SymInt base_resolution, float per_level_scale,"
    " SymInt log2_hashmap_size) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).t().contiguous().t(), devices=("cuda", "cpu")),
    ),
)


def _rows(sizes: Any) -> int:
    names = "levels", "base_resolution", "per_level_scale", "log2_hashmap_size"
    return table_rows(*(sizes[name] for name in names))


def _positions(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Off the planes between cells, where rounding decides about the cell."""
    return (call.rand(*shape) * 0.98 + 0.01).to(dtype)


def _case(name: str, tag: str, points: int, dtype: str = "float16", weight: float = 1, **more: Any) -> Case:
    return Case(name, {"points": points, **more}, dtype, weight, (tag,))


_SMALL: dict[str, Any] = {"levels": 4, "base_resolution": 4, "per_level_scale": 1.5, "log2_hashmap_size": 8}
SPEC = OpSpec(
    name="hash_encoding",
    level=1,
    reference=reference,
    op=hash_encoding,
    arguments=(
        Tensor("x", "points 3", "float32", values=_positions),
        Tensor("table", "rows features", values=uniform(-1.0, 1.0), bytes="0"),  # points may share rows
        Scalar("levels", default=16),
        Scalar("base_resolution", default=16),
        Scalar("per_level_scale", default=1.4472692012786865),  # to 4096: 2048 times the fox scene's aabb_scale
        Scalar("log2_hashmap_size", default=19),
    ),
    outputs=(Tensor("out", "points levels*features"),),
    axes={
        "points": Axis.per_call(), "features": Axis.option(2), "rows": Axis(_rows), "levels": Axis.option(16),
        "base_resolution": Axis.option(16), "per_level_scale": Axis.option(1.4472692012786865),
        "log2_hashmap_size": Axis.option(19),
    },
    dtype_arg=1,
    flops="8 * points * levels * (2 * features + 10)",
    cases=(
        _case("samples_2m", "model", 1 << 21, weight=8),
        _case("samples_256k", "model", 1 << 18, weight=4),
        _case("one", "odd", 1, "float32", **_SMALL),
        _case("odd_63", "odd", 63, "float32", **_SMALL),
        _case("odd_1000", "odd", 1000, **_SMALL),
        _case("odd_1128", "odd", 1128, "float32", features=4, **_SMALL | {"levels": 3}),
        _case("hashed", "odd", 257, "float32", **_SMALL | {"log2_hashmap_size": 5}),
        _case("dense", "odd", 129, **_SMALL | {"log2_hashmap_size": 14}),
        _case("scale_one", "odd", 65, "float32", **_SMALL | {"per_level_scale": 1.0}),
        _case("odd_bf16", "odd", 77, "bfloat16", features=1, **_SMALL),
        _case("none", "odd", 0, **_SMALL),
    ),
    tolerance=TOLERANCE | {"float32": Tolerance(1e-4, 1e-4)},
    tie_sensitive=True,
    permutable=lambda *args: Permutable(rows=(0,)),
    activations=("table",),
    baseline="reference",
)  # fmt: skip
