"""Samples of rays in the occupied cells of nested grids: Mueller et al., arXiv 2201.05989, appendix E."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Permutable
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MOST_CASCADES = 8
AT_ONCE = 32  # steps that the reference computes at once
STEP = math.sqrt(3) / 1024  # the smallest step: 1024 of them cross the unit cube


def step_limits(grid: int, cascades: int) -> tuple[float, float]:
    """(smallest, largest) step: a cell of the largest grid is the largest."""
    return STEP, max(STEP * (1 << (cascades - 1)) * 1024 / grid, STEP)


def morton(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The numbers of cells with interleaved bits of int64 coordinates below 1024, x in the lowest."""

    def spread(v: torch.Tensor) -> torch.Tensor:
        for shift, mask in ((16, 0x030000FF), (8, 0x0300F00F), (4, 0x030C30C3), (2, 0x09249249)):
            v = (v | (v << shift)) & mask
        return v

    return spread(x) | (spread(y) << 1) | (spread(z) << 2)


def occupied(
    place: torch.Tensor, step: torch.Tensor, bits: torch.Tensor, grid: int, cascades: int
) -> torch.Tensor:
    """Whether the cells of places [..., 3] are, in the finest grid that holds the place and is no finer than step."""
    far = (place - 0.5).abs().amax(-1)
    level = torch.zeros_like(far, dtype=torch.int64)
    for m in range(cascades - 1):
        level += ((far >= 0.5 * 2**m) | (step * 2 * grid >= 2**m)).long()
    cell = (((place - 0.5) * (0.5**level)[..., None] + 0.5) * grid).floor()
    inside = ((cell >= 0) & (cell < grid)).all(-1)
    x, y, z = cell.clamp(0, grid - 1).long().unbind(-1)
    at = level * grid**3 + morton(x, y, z)
    return inside & (((bits[at // 8].long() >> (at % 8)) & 1) == 1)


def reference(
    origins: torch.Tensor, directions: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, bits: torch.Tensor,
    samples: int, grid: int, cascades: int, cone_angle: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The next samples of each ray.

    origins, directions: [R, 3]; starts, ends: [R]; bits: [cascades * grid ** 3 / 8] uint8, the occupied cells. Grid k
    covers the cube around (0.5, 0.5, 0.5) with edges of 2 ** k; its cells are in Morton order. A ray steps from t =
    max(starts, 0) by clamp(t * cone_angle, step_limits(...)) while t < ends, and while a step changes t; it has a
    sample where the cell is occupied. Returns t [R, samples] and the steps [R, samples] of its first samples, 0 where
    it has no more, and the t [R] at which it goes on: at least ends, if it is done. Raises ValueError for shapes that
    do not fit.
    """
    _check(origins, directions, starts, ends, bits, samples, grid, cascades)
    acc = torch.promote_types(starts.dtype, torch.float32)
    start, way, t, end = (v.to(acc) for v in (origins, directions, starts.clamp_min(0), ends))
    small, large = step_limits(grid, cascades)
    count = torch.zeros_like(t, dtype=torch.int64)
    found = torch.zeros(
        2, len(t), samples + 1, dtype=acc, device=t.device
    )  # the last: for steps without a sample
    live = ((t < end) & (t + small > t)).nonzero()[:, 0] if samples else t.new_empty(0, dtype=torch.int64)
    while len(live):
        places = [t[live]]
        for _ in range(AT_ONCE):  # no step depends on the cells
            places.append(places[-1] + (places[-1] * cone_angle).clamp(small, large))
        every = torch.stack(places, 1)
        at = every[:, :-1]
        step = (at * cone_angle).clamp(small, large)
        on = (at < end[live, None]) & (at + small > at)
        hit = occupied(start[live, None] + at[..., None] * way[live, None], step, bits, grid, cascades) & on
        rank = count[live, None] + hit.cumsum(1)
        last = hit & (rank == samples)
        place = torch.where(hit & (rank <= samples), rank - 1, samples)
        for values, out in ((at, found[0]), (step, found[1])):
            out[live] = out[live].scatter(1, place, values)
        gone = torch.where(last.any(1), last.int().argmax(1) + 1, on.sum(1))
        t[live] = every.gather(1, gone[:, None])[:, 0]
        count[live] = rank[:, -1].clamp_max(samples)
        now = t[live]
        live = live[(now < end[live]) & (count[live] < samples) & (now + small > now)]
    made = [v[:, :samples].to(starts.dtype).clone(memory_format=torch.contiguous_format) for v in found]
    return made[0], made[1], t.to(starts.dtype, copy=True)


def _check(
    origins: torch.Tensor, directions: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, bits: torch.Tensor,
    samples: int, grid: int, cascades: int, *_: Any,
) -> None:  # fmt: skip
    rays = starts.shape
    if len(rays) != 1 or ends.shape != rays or any(t.shape != (*rays, 3) for t in (origins, directions)):
        raise ValueError(
            "march_rays: starts and ends must be [R], origins and directions [R, 3], got"
            f" {', '.join(str(list(t.shape)) for t in (starts, ends, origins, directions))}"
        )
    if not 1 <= cascades <= MOST_CASCADES or grid < 2 or grid & (grid - 1) or grid > 1024 or samples < 0:
        raise ValueError(
            f"march_rays: cascades {cascades} must be 1 to {MOST_CASCADES}, grid {grid} a power of two from 2 to 1024,"
            f" and samples {samples} at least 0"
        )
    if bits.shape != (cascades * grid**3 // 8,) or bits.dtype != torch.uint8:
        raise ValueError(
            f"march_rays: bits must be [{cascades * grid**3 // 8}] uint8, got {list(bits.shape)} {bits.dtype}"
        )


@triton.jit
def _spread(v):
    v = (v | (v << 16)) & 0x030000FF
    v = (v | (v << 8)) & 0x0300F00F
    v = (v | (v << 4)) & 0x030C30C3
    return (v | (v << 2)) & 0x09249249


@triton.jit(do_not_specialize=["R"])
def _march_kernel(
    origins_ptr, directions_ptr, starts_ptr, ends_ptr, bits_ptr, t_ptr, steps_ptr, next_ptr, R, cone, small, large,
    S: tl.constexpr, GRID: tl.constexpr, CASCADES: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One ray a thread; neighbours look at the same cells. The grids' bits stay in the L2 cache.
    follow(OVERLAP)
    ray = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = ray < R
    ox = tl.load(origins_ptr + ray * 3, mask=here, other=0.0)
    oy = tl.load(origins_ptr + ray * 3 + 1, mask=here, other=0.0)
    oz = tl.load(origins_ptr + ray * 3 + 2, mask=here, other=0.0)
    dx = tl.load(directions_ptr + ray * 3, mask=here, other=0.0)
    dy = tl.load(directions_ptr + ray * 3 + 1, mask=here, other=0.0)
    dz = tl.load(directions_ptr + ray * 3 + 2, mask=here, other=0.0)
    t = tl.maximum(tl.load(starts_ptr + ray, mask=here, other=0.0), 0.0)
    end = tl.load(ends_ptr + ray, mask=here, other=0.0)
    count = tl.zeros([BLOCK], tl.int32)
    live = here & (t < end) & (t + small > t)
    while tl.max(live.to(tl.int32), 0) > 0:
        step = tl.minimum(tl.maximum(t * cone, small), large)
        x, y, z = ox + t * dx, oy + t * dy, oz + t * dz
        far = tl.maximum(tl.maximum(tl.abs(x - 0.5), tl.abs(y - 0.5)), tl.abs(z - 0.5))
        level = tl.zeros([BLOCK], tl.int32)
        size = tl.zeros([BLOCK], tl.float32) + 1.0
        for m in tl.static_range(CASCADES - 1):
            coarser = (far >= 0.5 * (1 << m)) | (step * (2 * GRID) >= 1.0 * (1 << m))
            level += coarser.to(tl.int32)
            size = tl.where(coarser, size * 0.5, size)
        x, y, z = (
            tl.floor(((x - 0.5) * size + 0.5) * GRID),
            tl.floor(((y - 0.5) * size + 0.5) * GRID),
            tl.floor(((z - 0.5) * size + 0.5) * GRID),
        )
        inside = live & (x >= 0) & (x < GRID) & (y >= 0) & (y < GRID) & (z >= 0) & (z < GRID)
        x, y, z = tl.where(inside, x, 0.0), tl.where(inside, y, 0.0), tl.where(inside, z, 0.0)
        cell = _spread(x.to(tl.int32)) | (_spread(y.to(tl.int32)) << 1) | (_spread(z.to(tl.int32)) << 2)
        at = level.to(tl.int64) * (GRID * GRID * GRID) + cell
        byte = tl.load(bits_ptr + at // 8, mask=inside, other=0).to(tl.int32)
        hit = inside & (((byte >> (at % 8).to(tl.int32)) & 1) == 1)
        tl.store(t_ptr + ray * S + count, t, mask=hit)
        tl.store(steps_ptr + ray * S + count, step, mask=hit)
        count += hit.to(tl.int32)
        t = tl.where(live, t + step, t)
        live = here & (t < end) & (count < S) & (t + small > t)
    tl.store(next_ptr + ray, t, mask=here)


def _fake(
    origins: Any, directions: Any, starts: torch.Tensor, ends: Any, bits: Any, samples: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = starts.new_empty(starts.shape[0], samples)
    return made, torch.empty_like(made), starts.new_empty(starts.shape)


def _supports_triton(
    origins: torch.Tensor, directions: torch.Tensor, starts: torch.Tensor, *_: Any
) -> str | None:
    if {origins.dtype, directions.dtype, starts.dtype} != {torch.float32}:
        return f"the kernel is for float32, not {origins.dtype} and {starts.dtype}"
    return None


def _triton(
    origins: torch.Tensor, directions: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, bits: torch.Tensor,
    samples: int, grid: int, cascades: int, cone_angle: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    _check(origins, directions, starts, ends, bits, samples, grid, cascades)
    t, steps = (starts.new_zeros(len(starts), samples) for _ in range(2))
    after = starts.clamp_min(0).contiguous()
    if len(starts) and samples:
        small, large = step_limits(grid, cascades)
        launch_kernel(
            _march_kernel, (cdiv(len(starts), 128),), origins.contiguous(), directions.contiguous(),
            starts.contiguous(), ends.to(starts.dtype).contiguous(), bits.contiguous(), t, steps, after, len(starts),
            float(cone_angle), small, large, S=samples, GRID=grid, CASCADES=cascades, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return t, steps, after


march_rays = define(
    "march_rays(Tensor origins, Tensor directions, Tensor starts, Tensor ends, Tensor bits, SymInt samples,"
    " SymInt grid, SymInt cascades, float cone_angle) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Rays through a cloud of occupied cells. None comes so close to a cell's border that rounding would decide."""
    count, grid, cascades = call["rays"], call["grid"], call["cascades"]
    cells = call.rand(cascades * grid**3) < 0.2
    bits = (cells.view(-1, 8).long() << torch.arange(8, device=call.device)).sum(1).to(torch.uint8)
    target = 0.5 + 0.3 * (call.rand(count, 3) - 0.5)
    origins = 0.5 + F.normalize(call.randn(count, 3), dim=-1) * 0.9
    made = {"origins": origins, "directions": F.normalize(target - origins, dim=-1)}
    made["starts"] = 0.3 + 0.1 * call.rand(count)
    made["ends"] = made["starts"] + 0.2
    last = call["samples"], grid, cascades, call["cone_angle"]
    double: dict[str, Any] = {name: t.double() for name, t in made.items()}
    exact: Any = reference
    want = exact(*double.values(), bits, *last)
    firm = torch.ones(count, dtype=torch.bool, device=call.device)
    for moved in (-4e-6, 4e-6):
        near = {**double, "origins": double["origins"] + moved}
        found = exact(*near.values(), bits, *last)
        firm &= ((found[0] - want[0]).abs() < 1e-4).all(1) & ((found[2] - want[2]).abs() < 1e-4)
    if firm.any():
        chosen = torch.where(firm, torch.arange(count, device=call.device), firm.nonzero()[0, 0])
        made = {name: t[chosen] for name, t in made.items()}
    return {**made, "bits": bits}


def _case(
    name: str, tag: str, rays: int, samples: int, grid: int, cascades: int, cone_angle: float = 1 / 256,
    weight: float = 1,
) -> Case:  # fmt: skip
    dims = {"rays": rays, "samples": samples, "grid": grid, "cascades": cascades, "cone_angle": cone_angle}
    return Case(name, dims, "float32", weight, (tag,))


SPEC = OpSpec(
    name="march_rays",
    level=1,
    reference=reference,
    op=march_rays,
    arguments=(
        Tensor("origins", "rays 3"),
        Tensor("directions", "rays 3"),
        Tensor("starts", "rays"),
        Tensor("ends", "rays"),
        Tensor("bits", "cascades*grid*grid*grid//8", "uint8", bytes="0"),  # rays may share cells
        Scalar("samples"),
        Scalar("grid"),
        Scalar("cascades"),
        Scalar("cone_angle"),
    ),
    outputs=(Tensor("t", "rays samples"), Tensor("steps", "rays samples"), Tensor("next", "rays")),
    axes={
        "rays": Axis.per_call(), "samples": Axis.option(), "grid": Axis.option(), "cascades": Axis.option(),
        "cone_angle": Axis.option(),
    },
    values=_values,
    flops="60 * rays * samples",
    cases=(  # fox has an aabb_scale of 4: three grids; synthetic scenes have one, and steps of one size
        _case("fox_1080p", "model", 1920 * 1080, 16, 128, 3, weight=8),
        _case("lego_800", "model", 800 * 800, 16, 128, 1, 0.0, weight=4),
        _case("one", "odd", 1, 1, 8, 1, 0.0),
        _case("odd_63", "odd", 63, 16, 8, 1, 0.0),
        _case("odd_cone", "odd", 129, 8, 8, 2),
        _case("odd_1000", "odd", 1000, 2, 4, 1, 0.0),
        _case("cascades", "odd", 65, 7, 4, 4),
        _case("all_samples", "odd", 9, 400, 4, 3),
        _case("no_samples", "odd", 10, 0, 4, 1, 0.0),
        _case("none", "odd", 0, 4, 4, 2),
    ),
    tolerance={"float32": Tolerance(1e-4, 1e-5)},
    tie_sensitive=True,
    permutable=lambda *args: Permutable(rows=(0, 1, 2, 3)),
    activations=(),
    baseline="reference",
)  # fmt: skip
