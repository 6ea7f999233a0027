"""gsplat on the CPU: its PyTorch functions against ours, and its `rasterization`, patched and after undo.

gsplat's CUDA code does not run on a CPU: what its `rasterization` returns is compared with a float64 rasterizer.
"""

from __future__ import annotations

import functools
from typing import Any

import gsplat
import pytest
import torch
from gsplat.cuda import _torch_impl as theirs

import fastkernels
from fastkernels.core import registry
from fastkernels.overrides.geometry import gsplat as ours
from fastkernels.overrides.geometry.cases import cameras, scene
from fastkernels.patch import PatchError

WIDTH, HEIGHT = 70, 45
OPS = ("project_gaussians", "spherical_harmonics", "intersect_tiles", "rasterize_gaussians")


@pytest.fixture(scope="module")
def made() -> Any:
    generator = torch.Generator().manual_seed(3)
    return scene(150, generator), *cameras(2, WIDTH, HEIGHT, generator)


def exact(
    made: Any, sh: bool = True, background: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The images in float64, each pixel over all Gaussians in the order of their depths."""
    gaussians, views, ks = made
    means, quats, scales, opacity = (
        t.double() for t in (gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities)
    )
    covars = theirs._quat_scale_to_covar_preci(quats, scales, True, False)[0]
    radii, place, depth, conic, _ = theirs._fully_fused_projection(
        means, covars, views.double(), ks.double(), WIDTH, HEIGHT
    )
    colors, alphas = [], []
    for c in range(len(views)):
        eye = torch.linalg.inv(views[c].double())[:3, 3]
        color = (theirs._spherical_harmonics(3, means - eye, gaussians.coeffs.double()) + 0.5).clamp_min(0)
        y, x = torch.meshgrid(
            torch.arange(HEIGHT).double() + 0.5, torch.arange(WIDTH).double() + 0.5, indexing="ij"
        )
        light, done = torch.ones(HEIGHT, WIDTH).double(), torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
        image = torch.zeros(HEIGHT, WIDTH, 3).double()
        for g in depth[c].argsort():
            if not radii[c, g].all():
                continue
            dx, dy = x - place[c, g, 0], y - place[c, g, 1]
            a, b, d = conic[c, g]
            alpha = (opacity[g] * torch.exp(-(0.5 * (a * dx * dx + d * dy * dy) + b * dx * dy))).clamp_max(
                0.999
            )
            use = (alpha >= 1 / 255) & ~done
            done |= use & (light * (1 - alpha) <= 1e-4)
            use &= ~done
            image += torch.where(use, light * alpha, 0)[..., None] * color[g]
            light = torch.where(use, light * (1 - alpha), light)
        if background is not None:
            image = image + light[..., None] * background[c].double()
        colors.append(image)
        alphas.append(1 - light[..., None])
    return torch.stack(colors), torch.stack(alphas)


def test_projection_equals_gsplat(made: Any) -> None:
    gaussians, views, ks = made
    covars = theirs._quat_scale_to_covar_preci(gaussians.quats, gaussians.scales, True, False)[0]
    want = theirs._fully_fused_projection(
        gaussians.means, covars, views, ks, WIDTH, HEIGHT, calc_compensations=True
    )
    found = ours.gsplat_fully_fused_projection(
        gaussians.means,
        None,
        gaussians.quats,
        gaussians.scales,
        views,
        ks,
        WIDTH,
        HEIGHT,
        calc_compensations=True,
    )
    seen = (want[0] > 0).all(-1)
    assert (found[0] == want[0]).all() and seen.any()
    for one, other in zip(found[1:], want[1:], strict=True):
        torch.testing.assert_close(one[seen], other[seen], atol=2e-4, rtol=1e-4)
        assert not one[~seen].any()


@pytest.mark.parametrize("degree", range(5))
def test_harmonics_equal_gsplat(degree: int) -> None:
    generator = torch.Generator().manual_seed(0)
    dirs, coeffs = torch.randn(2, 40, 3, generator=generator), torch.randn(2, 40, 25, 3, generator=generator)
    want = theirs._spherical_harmonics(degree, dirs, coeffs)
    torch.testing.assert_close(
        ours.gsplat_spherical_harmonics(degree, dirs, coeffs), want, atol=1e-5, rtol=1e-5
    )
    shared = coeffs[:1].expand(2, -1, -1, -1)
    want = theirs._spherical_harmonics(degree, dirs, shared.contiguous())
    torch.testing.assert_close(
        ours.gsplat_spherical_harmonics(degree, dirs, shared), want, atol=1e-5, rtol=1e-5
    )


def test_intersections_equal_gsplat(made: Any) -> None:
    gaussians, views, ks = made
    radii, place, depth, _, _ = ours.gsplat_fully_fused_projection(
        gaussians.means, None, gaussians.quats, gaussians.scales, views, ks, WIDTH, HEIGHT
    )
    want = theirs._isect_tiles(place, radii, depth, 16, 5, 3)
    found = ours.gsplat_isect_tiles(place, radii, depth, 16, 5, 3)
    for one, other in zip(found, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    offsets = theirs._isect_offset_encode(want[1], 2, 5, 3)
    assert torch.equal(ours.gsplat_isect_offset_encode(found[1], 2, 5, 3), offsets)


def render(made: Any, **options: Any) -> Any:
    gaussians, views, ks = made
    return gsplat.rasterization(
        gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities, gaussians.coeffs, views, ks, WIDTH,
        HEIGHT, sh_degree=3, **{"packed": False, **options},
    )  # fmt: skip


def test_patched_rasterization_is_exact(made: Any) -> None:
    background = torch.tensor([[0.1, 0.5, 0.9], [1.0, 0.0, 0.3]])
    want, want_alpha = exact(made, background=background)
    before = gsplat.rendering.isect_tiles
    with fastkernels.patch(gsplat, ops=OPS) as report:
        colors, alphas, meta = render(made, backgrounds=background)
        for found, exactly in ((colors, want), (alphas, want_alpha)):
            off = (found.double() - exactly).abs()
            assert (
                off.mean() < 1e-5 and (off > 1e-3).float().mean() < 1e-3
            )  # a threshold may be passed differently
        assert (
            meta["isect_offsets"].shape == (2, 3, 5)
            and meta["flatten_ids"].numel() == meta["isect_ids"].numel()
        )
        depth = render(made, render_mode="RGB+ED")[0]
        assert depth.shape == (2, HEIGHT, WIDTH, 4) and torch.allclose(depth[..., :3], render(made)[0])
        report.refresh()
        assert report.verified and len(report.active) == 5 and all(row.calls for row in report.active)
        assert gsplat.rendering.isect_tiles is not before
        with pytest.raises(PatchError, match="patched already"):
            fastkernels.patch("gsplat", ops=OPS)
    assert gsplat.rendering.isect_tiles is before and gsplat.isect_tiles is before


def test_packed_rasterization_of_one_image_is_the_same(made: Any) -> None:
    one = made[0], made[1][:1], made[2][:1]
    with fastkernels.patch(gsplat, ops=OPS):
        want = render(one)
        found = render(one, packed=True)
    torch.testing.assert_close(found[0], want[0])
    torch.testing.assert_close(found[1], want[1])
    assert found[2]["gaussian_ids"].dtype == torch.int64


def test_camera_that_sees_nothing_has_an_empty_image(made: Any) -> None:
    """As gsplat's CUDA code, which lists no intersection for no Gaussian."""
    gaussians, views, ks = made
    away = torch.eye(4)[None].clone()
    away[:, 2, 3] = -1000.0
    none = type(gaussians)(**{name: t[:0] for name, t in vars(gaussians).items()})
    background = torch.tensor([[0.1, 0.5, 0.9]])
    with fastkernels.patch(gsplat, ops=OPS) as report:
        for packed in (False, True):
            colors, alphas, meta = render((gaussians, away, ks[:1]), packed=packed, backgrounds=background)
            assert torch.equal(colors, background.expand_as(colors)) and not alphas.any()
            assert meta["isect_offsets"].shape == (1, 3, 5) and not meta["flatten_ids"].numel()
        colors, alphas, _ = render((none, views, ks))
        assert colors.shape == (2, HEIGHT, WIDTH, 3) and not colors.any() and not alphas.any()
        assert not any(row.fallbacks for row in report.refresh().active)


def test_refused_calls_run_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(gsplat.cuda._wrapper._SphericalHarmonics, "apply", lambda *args: called.append(args))
    dirs = torch.randn(4, 3, requires_grad=True)
    with fastkernels.patch(gsplat, ops=["spherical_harmonics"]) as report:
        gsplat.spherical_harmonics(1, dirs, torch.randn(4, 4, 3))
        gsplat.spherical_harmonics(1, dirs.detach(), torch.randn(4, 4, 3))
        (row,) = report.refresh().active
        assert row.calls == 1 and row.fallbacks == {"gradients are not supported": 1} and len(called) == 1
    with (
        fastkernels.patch(gsplat, ops=["spherical_harmonics"], strict=True),
        pytest.raises(PatchError, match="gradients are not supported"),
    ):
        gsplat.spherical_harmonics(1, dirs, torch.randn(4, 4, 3))


def test_flat_gaussians_and_distorted_cameras_are_the_librarys(made: Any) -> None:
    """gsplat's CUDA code of them cannot run here: the calls have to reach it, and are counted with the reason."""
    gaussians, views, ks = made
    names = ("means", "quats", "scales", "opacities")
    given = [*(getattr(gaussians, n) for n in names), torch.rand(150, 3), views, ks, WIDTH, HEIGHT]
    unscented = {"packed": False, "with_ut": True, "with_eval3d": True}
    before = gsplat.rendering.rasterize_to_pixels_2dgs
    for strict in (False, True):
        with fastkernels.patch(gsplat, ops=OPS, strict=strict) as report:
            for call in (gsplat.rasterization_2dgs, functools.partial(gsplat.rasterization, **unscented)):
                with pytest.raises(Exception, match=r"CUDA|NoneType|cuda"):
                    call(*given)
            rows = {r.host_class: r for r in report.refresh().rows if r.state == "off"}
            assert "2-D Gaussians: gsplat's code" in rows["rasterize_to_pixels_2dgs"].reason
            counted = {name: sum(row.fallbacks.values()) for name, row in rows.items()}
            assert counted == {
                "fully_fused_projection_2dgs": 1, "fully_fused_projection_with_ut": 1,
                "rasterize_to_pixels_2dgs": 0, "rasterize_to_pixels_eval3d": 0,
            }  # fmt: skip
            assert "with_ut" in next(iter(rows["fully_fused_projection_with_ut"].fallbacks))
    assert gsplat.rendering.rasterize_to_pixels_2dgs is before


def test_nothing_is_patched_without_a_request() -> None:
    before = gsplat.rendering.isect_tiles
    report = fastkernels.patch(gsplat)
    assert not report.active and gsplat.rendering.isect_tiles is before
    report.undo()
    assert {t.path for op in OPS for t in registry.get(op).targets_for("gsplat")} >= {
        "gsplat.cuda._wrapper:isect_tiles", "gsplat.cuda._wrapper:rasterize_to_pixels",
    }  # fmt: skip


def test_candidate_function_runs_in_the_library(made: Any, tmp_path: Any) -> None:
    text = "from fastkernels.overrides.geometry.spherical_harmonics import reference\n\n\n{}"
    file = tmp_path / "spherical_harmonics.py"
    file.write_text(text.format("def spherical_harmonics(*args):\n    return 0.5 * reference(*args)\n"))
    with fastkernels.patch(gsplat, ops=OPS):
        want = render(made)[0]
    with fastkernels.patch(gsplat, ops=OPS, candidates={"spherical_harmonics": str(file)}) as report:
        found = render(made)[0]
        calls = report.refresh().candidates
    assert calls["spherical_harmonics"] == 1 and (found - want).abs().mean() > 0.01
    with fastkernels.patch(gsplat, ops=OPS):
        torch.testing.assert_close(render(made)[0], want)
    file.write_text(text.format("class A:\n    pass\n"))
    with pytest.raises(PatchError, match="spherical_harmonics"):
        fastkernels.patch(gsplat, ops=OPS, candidates={"spherical_harmonics": str(file)})
    wrong = {"rms_norm": str(file)}
    with fastkernels.patch(gsplat, ops=["spherical_harmonics"], candidates=wrong) as report:
        assert "no function of this op" in next(r.reason for r in report.rows if r.op == "rms_norm")


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_patched_rasterization_equals_gsplat_on_a_gpu(packed: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    made = scene(20_000, generator), *cameras(1, 640, 360, generator)

    def run() -> Any:
        gaussians, views, ks = made
        return gsplat.rasterization(
            gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities, gaussians.coeffs, views, ks, 640,
            360, sh_degree=3, packed=packed,
        )  # fmt: skip

    want = run()
    with fastkernels.patch(gsplat, ops=OPS) as report:
        found = run()
        assert report.refresh().verified
    for one, other in zip(found[:2], want[:2], strict=True):
        off = (one - other).abs()
        assert off.mean() < 1e-4 and (off > 1e-2).float().mean() < 1e-3
