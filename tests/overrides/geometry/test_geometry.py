"""Ops of scenes: edge cases, arguments that are refused, and equations in other forms than the references'."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels.models.common.interfaces.camera import rays
from fastkernels.overrides.geometry import composite_rays as composite
from fastkernels.overrides.geometry import fused_mlp as mlp
from fastkernels.overrides.geometry import hash_encoding as hashing
from fastkernels.overrides.geometry import intersect_tiles as tiles
from fastkernels.overrides.geometry import march_rays as march
from fastkernels.overrides.geometry import project_gaussians as project
from fastkernels.overrides.geometry import rasterize_gaussians as raster
from fastkernels.overrides.geometry import spherical_harmonics as harmonics
from fastkernels.overrides.geometry.cases import cameras, scene

EYE = torch.eye(4)[None]
K = torch.tensor([[[50.0, 0, 16], [0, 50, 16], [0, 0, 1]]])


def projected(means: torch.Tensor, scales: float = 0.1, opacity: float = 0.5) -> tuple[torch.Tensor, ...]:
    n = len(means)
    quats = torch.tensor([[1.0, 0, 0, 0]]).expand(n, 4)
    return project.project_gaussians(
        means, quats, torch.full((n, 3), scales), torch.full((n,), opacity), EYE, K, 32, 32
    )


@pytest.mark.parametrize(
    "mean",
    [[0, 0, -3.0], [0, 0, 0.0], [0, 0, 2e10], [math.nan, 0, 3], [0, 0, math.inf], [90.0, 0, 3], [0, 90, 3]],
)
def test_gaussians_that_no_camera_sees_are_zero(mean: list[float]) -> None:
    for found in projected(torch.tensor([mean])):
        assert not found.any()


def test_values_beyond_their_range_hide_a_gaussian() -> None:
    at = torch.tensor([[0.0, 0, 3]])
    for scale, opacity in ((math.nan, 0.5), (0.1, math.nan), (0.1, 1 / 256), (math.inf, 0.5)):
        assert not projected(at, scale, opacity)[0].any()
    assert projected(at, 0.1, 1 / 254)[0].any() and projected(at, 0.0)[0].any()


def test_a_sphere_on_the_axis_projects_to_a_circle() -> None:
    radii, place, depth, conic, soft = (t[0, 0] for t in projected(torch.tensor([[0.0, 0, 5]])))
    variance = (50 * 0.1 / 5) ** 2 + 0.3
    reach = min(3.33, math.sqrt(2 * math.log(0.5 * 255)))
    assert radii.tolist() == [math.ceil(reach * math.sqrt(variance))] * 2
    assert place.tolist() == [16, 16] and depth == 5
    torch.testing.assert_close(conic, torch.tensor([1 / variance, 0, 1 / variance]))
    torch.testing.assert_close(soft, torch.tensor(1 / variance))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.sampled_from([4, 8, 16]))
def test_each_tile_lists_what_covers_it(seed: int, count: int, size: int) -> None:
    """With equal depths, too."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.rand(2, count, 2, generator=generator) * 60 - 10
    radii = torch.randint(0, 12, (2, count, 2), generator=generator, dtype=torch.int32)
    depths = torch.randint(1, 4, (2, count), generator=generator).float()
    x, y = 3, 2
    total = int(tiles.tiles_per_gaussian(means, radii, size, x, y).sum())
    ids, offsets = tiles.intersect_tiles(means, radii, depths, size, x, y, total)
    assert int(offsets[-1]) == total
    for tile in range(2 * x * y):
        image, row, column = tile // (x * y), tile % (x * y) // x, tile % x
        want = []
        for g in depths[image].sort(stable=True).indices.tolist():
            (mx, my), (rx, ry) = means[image, g].tolist(), radii[image, g].tolist()
            across = mx - rx < (column + 1) * size and mx + rx > column * size
            along = my - ry < (row + 1) * size and my + ry > row * size
            if rx and ry and across and along:
                want.append(image * count + g)
        assert ids[offsets[tile] : offsets[tile + 1]].tolist() == want


def test_a_small_capacity_keeps_the_nearest() -> None:
    means, radii = torch.full((1, 5, 2), 8.0), torch.ones(1, 5, 2, dtype=torch.int32)
    depths = torch.tensor([[5.0, 1, 4, 2, 3]])
    ids, offsets = tiles.intersect_tiles(means, radii, depths, 16, 1, 1, 3)
    assert ids.tolist() == [1, 3, 4] and offsets.tolist() == [0, 3]
    ids, offsets = tiles.intersect_tiles(means, radii, depths, 16, 1, 1, 7)
    assert ids.tolist() == [1, 3, 4, 2, 0, -1, -1] and offsets.tolist() == [0, 5]


def test_rasterizing_nothing_gives_the_background() -> None:
    background = torch.tensor([[0.5, 1.0, 0.0]])
    empty = torch.zeros(1, 0, 2), torch.zeros(1, 0, 3), torch.zeros(1, 0, 3), torch.zeros(1, 0)
    color, alpha = raster.rasterize_gaussians(
        *empty, 20, 18, 16, torch.zeros(5, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), background
    )
    assert (color == background).all() and not alpha.any()


def test_rasterized_light_is_conserved() -> None:
    """White Gaussians on white are white, whatever their order is; NaN opacities are left out."""
    generator = torch.Generator().manual_seed(0)
    made = scene(80, generator, 0)
    views, ks = cameras(1, 40, 30, generator)
    radii, means, depths, conics, _ = project.project_gaussians(
        made.means, made.quats, made.scales, None, views, ks, 40, 30
    )
    ids, offsets = tiles.intersect_tiles(means, radii, depths, 16, 3, 2, 3000)
    opacities = made.opacities[None].clone()
    opacities[0, 7] = math.nan
    white = torch.ones(1, 80, 3)
    color, alpha = raster.rasterize_gaussians(
        means, conics, white, opacities, 40, 30, 16, offsets, ids, white[:, 0]
    )
    torch.testing.assert_close(color, torch.ones_like(color))
    assert alpha.max() > 0.5 and alpha.max() < 1


def test_harmonics_are_orthonormal() -> None:
    directions = F.normalize(
        torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0)).double(), dim=1
    )
    values = harmonics.basis(directions, 4)
    gram = values.T @ values / len(values) * 4 * math.pi
    torch.testing.assert_close(gram, torch.eye(25).double(), atol=0.03, rtol=0)


def test_dense_levels_interpolate_a_grid() -> None:
    """A table that is linear in the vertex gives a linear function."""
    side = math.ceil(4.0 - 1) + 1
    vertex = torch.arange(side**3)
    x, y, z = vertex % side, vertex // side % side, vertex // side**2
    table = torch.zeros(hashing.table_rows(1, 4, 1.0, 10), 1)
    table[: side**3, 0] = (x + 10 * y + 100 * z).float()
    points = torch.rand(50, 3) * 0.8
    found = hashing.hash_encoding(points, table, 1, 4, 1.0, 10)[:, 0]
    place = points * 3.0 + 0.5
    torch.testing.assert_close(found, place @ torch.tensor([1.0, 10, 100]), atol=1e-3, rtol=1e-4)


def test_marching_a_full_grid_takes_every_step() -> None:
    bits = torch.full((64,), 255, dtype=torch.uint8)
    start, way = torch.tensor([[0.5, 0.5, -0.1]]), torch.tensor([[0.0, 0, 1]])
    t, steps, after = march.march_rays(
        start, way, torch.tensor([0.1]), torch.tensor([1.1]), bits, 1000, 8, 1, 0.0
    )
    count = int((steps > 0).sum())
    assert count == math.ceil(1 / march.STEP) and after >= 1.1
    torch.testing.assert_close(t[0, :count], 0.1 + march.STEP * torch.arange(count), atol=1e-4, rtol=0)


@pytest.mark.parametrize("start", [math.nan, -math.inf, 1e30, math.inf])
def test_marching_from_anywhere_ends(start: float) -> None:
    bits = torch.full((64,), 255, dtype=torch.uint8)
    way = torch.tensor([[0.0, 0, 1]])
    given = torch.tensor([[0.5, 0.5, 0.5]]), way, torch.tensor([start]), torch.tensor([2.0])
    _, steps, _ = march.march_rays(*given, bits, 4, 8, 1, 0.0)
    assert (steps > 0).sum() in (0, 4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 9), st.integers(0, 9))
def test_compositing_in_parts_is_compositing(seed: int, count: int, samples: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    colors, densities, steps = (torch.rand(count, samples, n, generator=generator) for n in (3, 1, 1))
    densities, steps = 20 * densities[..., 0], steps[..., 0].where(steps[..., 0] > 0.3, 0)
    light = torch.ones(count)
    whole, left = composite.composite_rays(colors, densities, steps, light)
    first, light = composite.composite_rays(colors[:, :cut], densities[:, :cut], steps[:, :cut], light)
    second, end = composite.composite_rays(colors[:, cut:], densities[:, cut:], steps[:, cut:], light)
    torch.testing.assert_close(first + second, whole)
    torch.testing.assert_close(end, left)
    torch.testing.assert_close(left, (-(densities * steps).sum(1)).exp())


def test_networks_of_any_width_run() -> None:
    x, shapes = torch.randn(5, 20), [(24, 20), (24, 24), (3, 24)]
    parts = [torch.randn(shape) for shape in shapes]
    want = parts[2] @ (parts[1] @ (parts[0] @ x.T).relu()).relu()
    found = mlp.fused_mlp(x, torch.cat([p.flatten() for p in parts]), 24, 2, 3)
    torch.testing.assert_close(found, want.T, atol=1e-3, rtol=1e-4)


def test_rays_pass_through_their_pixels() -> None:
    views, ks = cameras(2, 8, 6, torch.Generator().manual_seed(0))
    origins, directions = rays(views, ks, 8, 6)
    for i in (0, 47, 48, 95):
        view, at = views[i // 48], origins[i] + 3 * directions[i]
        x, y, z = ks[0] @ (view[:3, :3] @ at + view[:3, 3])
        assert abs(x / z - (i % 8 + 0.5)) < 1e-3 and abs(y / z - (i % 48 // 8 + 0.5)) < 1e-3


def test_shapes_that_do_not_fit_are_refused() -> None:
    n, ints = torch.zeros(1, 4, 2), torch.zeros(1, 4, 2, dtype=torch.int32)
    bits = torch.zeros(64, dtype=torch.uint8)
    one = torch.zeros(1)
    for call, error in (
        (lambda: projected(torch.zeros(3, 2)), r"means must be \[3, 3\], got \[3, 2\]"),
        (
            lambda: harmonics.spherical_harmonics(torch.zeros(1, 3), torch.zeros(1, 36, 3), 5),
            "from 0 to 4, got 5",
        ),
        (lambda: harmonics.spherical_harmonics(torch.zeros(1, 3), torch.zeros(1, 4, 3), 2), "needs 9"),
        (
            lambda: harmonics.spherical_harmonics(torch.zeros(3, 3), torch.zeros(2, 1, 3), 0),
            "do not divide 3",
        ),
        (lambda: tiles.intersect_tiles(n, ints, torch.zeros(1, 3), 16, 1, 1, 1), r"must be \[I, N\]"),
        (lambda: tiles.intersect_tiles(n, ints, torch.zeros(1, 4), 16, 1, 1, -1), "capacity -1"),
        (
            lambda: tiles.intersect_tiles(n, ints, torch.zeros(1, 4), 16, 1, 1, 2**31),
            "render fewer images",
        ),
        (
            lambda: raster.rasterize_gaussians(
                n,
                torch.zeros(1, 4, 3),
                torch.zeros(1, 4, 3),
                torch.zeros(1, 4),
                17,
                3,
                16,
                ints[0, :2, 0],
                ints[0, :, 0],
            ),
            r"offsets must be \[1 \* 1 \* 2 \+ 1\]",
        ),
        (lambda: hashing.hash_encoding(torch.zeros(1, 3), torch.zeros(9, 2), 1, 4, 1.0, 10), "table"),
        (lambda: mlp.fused_mlp(torch.zeros(1, 3), torch.zeros(9), 2, 1, 2), r"weights must be \[10\]"),
        (lambda: march.march_rays(n[0], n[0], one, one, bits, 1, 8, 1, 0.0), "origins and directions"),
        (lambda: march.march_rays(K[0, :1], K[0, :1], one, one, bits, 1, 6, 1, 0.0), "grid 6 a power of two"),
        (lambda: composite.composite_rays(K, K[0], K[0], one), "composite_rays"),
    ):
        with pytest.raises(ValueError, match=error):
            call()  # type: ignore[no-untyped-call]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [63, 50_000])
def test_a_rendered_frame_on_a_gpu_equals_the_references(count: int) -> None:
    """All four ops of Gaussians in a row, against float64 references on the CPU."""
    generator = torch.Generator().manual_seed(1)
    made = scene(count, generator)
    views, ks = cameras(2, 200, 120, generator)
    frames = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        means, quats, scales, opacities, coeffs, v, k = (
            t.to(device, dtype)
            for t in (made.means, made.quats, made.scales, made.opacities, made.coeffs, views, ks)
        )
        radii, place, depths, conics, _ = project.project_gaussians(
            means, quats, scales, opacities, v, k, 200, 120
        )
        dirs = means - torch.linalg.inv(v)[:, None, :3, 3]
        colors = harmonics.spherical_harmonics(dirs, coeffs, 3, (radii > 0).all(-1))
        total = int(tiles.tiles_per_gaussian(place, radii, 16, 13, 8).sum())
        ids, offsets = tiles.intersect_tiles(place, radii, depths, 16, 13, 8, total)
        each = opacities.expand(2, count)
        color, _ = raster.rasterize_gaussians(place, conics, colors, each, 200, 120, 16, offsets, ids)
        frames.append(color.double().cpu())
    off = (frames[0] - frames[1]).abs()
    assert off.mean() < 1e-4 and (off > 1e-2).double().mean() < 1e-3
