"""Projection of 3-D Gaussians to image planes: Kerbl et al., arXiv 2308.04079; Zwicker et al., EWA splatting, 2001."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Permutable
from fastkernels.overrides.geometry.cases import cameras, scene
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

LEAST_ALPHA = 1 / 255  # smaller alphas are skipped, as in the paper's renderer
EXTENT = 3.33  # standard deviations that a Gaussian covers at most
MARGIN = 0.3  # of the field of view, beyond which the projection's derivative is taken at the edge

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    means: torch.Tensor, quats: torch.Tensor, scales: torch.Tensor, opacities: torch.Tensor | None,
    viewmats: torch.Tensor, Ks: torch.Tensor, width: int, height: int, eps2d: float = 0.3, near_plane: float = 0.01,
    far_plane: float = 1e10, radius_clip: float = 0.0,
) -> Projected:  # fmt: skip
    """Gaussians as C cameras see them.

    means: [N, 3]; quats: [N, 4], w first, of any length; scales: [N, 3]; opacities: [N] or None; viewmats: [C, 4, 4],
    world to camera; Ks: [C, 3, 3] in pixels. Returns

        radii [C, N, 2] int32       half the sides of the rectangle that the Gaussian covers; with opacities, where
                                    its alpha is at least 1/255. 0: the camera does not see it, and the rest is 0
        means2d [C, N, 2]           in pixels
        depths [C, N]
        conics [C, N, 3]            xx, xy and yy of the inverse of the 2-D covariance, to which eps2d is added
        compensations [C, N]        sqrt(det(covariance) / det(covariance + eps2d))

    A Gaussian is not seen outside of near_plane .. far_plane, off the image, with both radii at most radius_clip, with
    an opacity below 1/255, or with a value that is NaN. Raises ValueError for shapes that do not fit.
    """
    _check(means, quats, scales, opacities, viewmats, Ks, width, height)
    acc = torch.promote_types(means.dtype, torch.float32)
    mean, view, k = means.to(acc), viewmats.to(acc), Ks.to(acc)
    w, x, y, z = F.normalize(quats.to(acc), dim=-1).unbind(-1)
    turn = torch.stack(
        (
            1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
        ),
        -1,
    ).unflatten(-1, (3, 3))  # fmt: skip
    rotation = view[:, None, :3, :3]  # [C, 1, 3, 3]
    half = rotation @ (turn * scales.to(acc)[:, None])  # [C, N, 3, 3]: a root of the covariance
    place = (rotation @ mean[:, :, None])[..., 0] + view[:, None, :3, 3]  # [C, N, 3]
    px, py, depth = place.unbind(-1)
    fx, fy, cx, cy = (k[:, i, j, None] for i, j in ((0, 0), (1, 1), (0, 2), (1, 2)))
    margin_x, margin_y = MARGIN * 0.5 * width / fx, MARGIN * 0.5 * height / fy
    tx = depth * (px / depth).clamp(-(cx / fx + margin_x), (width - cx) / fx + margin_x)
    ty = depth * (py / depth).clamp(-(cy / fy + margin_y), (height - cy) / fy + margin_y)
    row_x = (fx / depth)[..., None] * half[..., 0, :] - (fx * tx / depth**2)[..., None] * half[..., 2, :]
    row_y = (fy / depth)[..., None] * half[..., 1, :] - (fy * ty / depth**2)[..., None] * half[..., 2, :]
    a, b, c = (row_x * row_x).sum(-1), (row_x * row_y).sum(-1), (row_y * row_y).sum(-1)
    sharp = a * c - b * b
    a, c = a + eps2d, c + eps2d
    det = a * c - b * b
    compensation = (sharp / det).clamp_min(0).sqrt()
    extent = torch.full_like(det, EXTENT)
    seen = (depth >= near_plane) & (depth <= far_plane) & (det > 0)
    if opacities is not None:
        opacity = opacities.to(acc)
        seen &= opacity >= LEAST_ALPHA
        extent = extent.minimum((2 * (opacity / LEAST_ALPHA).log()).clamp_min(0).sqrt())
    rx, ry = (extent * a.sqrt()).ceil(), (extent * c.sqrt()).ceil()
    u, v = fx * px / depth + cx, fy * py / depth + cy
    seen &= (rx > radius_clip) | (ry > radius_clip)
    seen &= (u + rx > 0) & (u - rx < width) & (v + ry > 0) & (v - ry < height)
    radii = torch.stack((rx, ry), -1).where(seen[..., None], 0).to(torch.int32)
    found = (
        torch.stack((u, v), -1).where(seen[..., None], 0), depth.where(seen, 0),
        torch.stack((c / det, -b / det, a / det), -1).where(seen[..., None], 0), compensation.where(seen, 0),
    )  # fmt: skip
    u2, d, con, comp = (t.to(means.dtype) for t in found)
    return radii, u2, d, con, comp


def _check(
    means: torch.Tensor, quats: torch.Tensor, scales: torch.Tensor, opacities: torch.Tensor | None,
    viewmats: torch.Tensor, Ks: torch.Tensor, width: int, height: int, *_: Any,
) -> None:  # fmt: skip
    n, c = len(means), len(viewmats)
    wanted = {"means": (n, 3), "quats": (n, 4), "scales": (n, 3), "viewmats": (c, 4, 4), "Ks": (c, 3, 3)}
    given = {"means": means, "quats": quats, "scales": scales, "viewmats": viewmats, "Ks": Ks}
    if opacities is not None:
        wanted["opacities"], given["opacities"] = (n,), opacities
    for name, shape in wanted.items():
        if given[name].shape != shape:
            raise ValueError(
                f"project_gaussians: {name} must be {list(shape)}, got {list(given[name].shape)}"
            )
    if width < 1 or height < 1:
        raise ValueError(f"project_gaussians: the image must have pixels, got {width} x {height}")


@triton.jit(do_not_specialize=["N", "width", "height"])
def _project_kernel(
    means_ptr, quats_ptr, scales_ptr, opacities_ptr, views_ptr, ks_ptr, radii_ptr, means2d_ptr, depths_ptr, conics_ptr,
    comp_ptr, N, width, height, eps2d, near, far, clip, least_alpha, extent_max, margin, HAS_OPACITY: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One Gaussian a thread. Its 3-D covariance is never formed: rows of J R Q S give the 2-D one.
    follow(OVERLAP)
    camera = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    view, k = views_ptr + camera * 16, ks_ptr + camera * 9
    r00, r01, r02, t0 = tl.load(view), tl.load(view + 1), tl.load(view + 2), tl.load(view + 3)
    r10, r11, r12, t1 = tl.load(view + 4), tl.load(view + 5), tl.load(view + 6), tl.load(view + 7)
    r20, r21, r22, t2 = tl.load(view + 8), tl.load(view + 9), tl.load(view + 10), tl.load(view + 11)
    fx, cx, fy, cy = tl.load(k), tl.load(k + 2), tl.load(k + 4), tl.load(k + 5)
    mx = tl.load(means_ptr + i * 3, mask=here, other=0.0)
    my = tl.load(means_ptr + i * 3 + 1, mask=here, other=0.0)
    mz = tl.load(means_ptr + i * 3 + 2, mask=here, other=0.0)
    px = r00 * mx + r01 * my + r02 * mz + t0
    py = r10 * mx + r11 * my + r12 * mz + t1
    depth = r20 * mx + r21 * my + r22 * mz + t2
    seen = here & (depth >= near) & (depth <= far)
    # A Gaussian outside of the planes needs no other values: most of a large scene
    qw = tl.load(quats_ptr + i * 4, mask=seen, other=1.0)
    qx = tl.load(quats_ptr + i * 4 + 1, mask=seen, other=0.0)
    qy = tl.load(quats_ptr + i * 4 + 2, mask=seen, other=0.0)
    qz = tl.load(quats_ptr + i * 4 + 3, mask=seen, other=0.0)
    s0 = tl.load(scales_ptr + i * 3, mask=seen, other=0.0)
    s1 = tl.load(scales_ptr + i * 3 + 1, mask=seen, other=0.0)
    s2 = tl.load(scales_ptr + i * 3 + 2, mask=seen, other=0.0)
    length = tl.maximum(tl.sqrt(qw * qw + qx * qx + qy * qy + qz * qz), 1e-12)
    qw, qx, qy, qz = qw / length, qx / length, qy / length, qz / length
    m00, m01, m02 = 1 - 2 * (qy * qy + qz * qz), 2 * (qx * qy - qw * qz), 2 * (qx * qz + qw * qy)
    m10, m11, m12 = 2 * (qx * qy + qw * qz), 1 - 2 * (qx * qx + qz * qz), 2 * (qy * qz - qw * qx)
    m20, m21, m22 = 2 * (qx * qz - qw * qy), 2 * (qy * qz + qw * qx), 1 - 2 * (qx * qx + qy * qy)
    inv = 1.0 / tl.where(seen, depth, 1.0)
    at_x, at_y = px * inv, py * inv
    wide, tall = width.to(tl.float32), height.to(tl.float32)
    margin_x, margin_y = margin * wide / fx, margin * tall / fy
    slope_x = tl.minimum(tl.maximum(at_x, -(cx / fx + margin_x)), (wide - cx) / fx + margin_x)
    slope_y = tl.minimum(tl.maximum(at_y, -(cy / fy + margin_y)), (tall - cy) / fy + margin_y)
    jx, jy = fx * inv, fy * inv
    # Rows of J R: x and y of the image by world coordinates
    a0, a1, a2 = jx * (r00 - slope_x * r20), jx * (r01 - slope_x * r21), jx * (r02 - slope_x * r22)
    b0, b1, b2 = jy * (r10 - slope_y * r20), jy * (r11 - slope_y * r21), jy * (r12 - slope_y * r22)
    u0, u1, u2 = (
        (a0 * m00 + a1 * m10 + a2 * m20) * s0,
        (a0 * m01 + a1 * m11 + a2 * m21) * s1,
        (a0 * m02 + a1 * m12 + a2 * m22) * s2,
    )
    v0, v1, v2 = (
        (b0 * m00 + b1 * m10 + b2 * m20) * s0,
        (b0 * m01 + b1 * m11 + b2 * m21) * s1,
        (b0 * m02 + b1 * m12 + b2 * m22) * s2,
    )
    a = u0 * u0 + u1 * u1 + u2 * u2
    b = u0 * v0 + u1 * v1 + u2 * v2
    c = v0 * v0 + v1 * v1 + v2 * v2
    # det(A A^T) as the sum of squared minors: a c - b^2 cancels for thin Gaussians
    n0, n1, n2 = u1 * v2 - u2 * v1, u2 * v0 - u0 * v2, u0 * v1 - u1 * v0
    sharp = n0 * n0 + n1 * n1 + n2 * n2
    det = sharp + eps2d * (a + c) + eps2d * eps2d
    a, c = a + eps2d, c + eps2d
    seen = seen & (det > 0.0)
    extent = extent_max
    if HAS_OPACITY:
        opacity = tl.load(opacities_ptr + i, mask=seen, other=0.0)
        seen = seen & (opacity >= least_alpha)
        extent = tl.minimum(extent_max, tl.sqrt(2.0 * tl.log(tl.where(seen, opacity / least_alpha, 1.0))))
    rx, ry = tl.ceil(extent * tl.sqrt(a)), tl.ceil(extent * tl.sqrt(c))
    at_x, at_y = fx * at_x + cx, fy * at_y + cy
    seen = seen & ((rx > clip) | (ry > clip))
    seen = seen & (at_x + rx > 0.0) & (at_x - rx < wide) & (at_y + ry > 0.0) & (at_y - ry < tall)
    out = camera * N + i
    inv = 1.0 / tl.where(seen, det, 1.0)
    tl.store(radii_ptr + out * 2, tl.where(seen, rx, 0.0).to(tl.int32), mask=here)
    tl.store(radii_ptr + out * 2 + 1, tl.where(seen, ry, 0.0).to(tl.int32), mask=here)
    tl.store(means2d_ptr + out * 2, tl.where(seen, at_x, 0.0), mask=here)
    tl.store(means2d_ptr + out * 2 + 1, tl.where(seen, at_y, 0.0), mask=here)
    tl.store(depths_ptr + out, tl.where(seen, depth, 0.0), mask=here)
    tl.store(conics_ptr + out * 3, tl.where(seen, c * inv, 0.0), mask=here)
    tl.store(conics_ptr + out * 3 + 1, tl.where(seen, -b * inv, 0.0), mask=here)
    tl.store(conics_ptr + out * 3 + 2, tl.where(seen, a * inv, 0.0), mask=here)
    tl.store(comp_ptr + out, tl.where(seen, tl.sqrt(sharp * inv), 0.0), mask=here)


def _fake(
    means: torch.Tensor, quats: torch.Tensor, scales: Any, opacities: Any, viewmats: Any, *_: Any
) -> Projected:
    c, n = viewmats.shape[0], means.shape[0]
    return (
        means.new_empty((c, n, 2), dtype=torch.int32), means.new_empty((c, n, 2)), means.new_empty((c, n)),
        means.new_empty((c, n, 3)), means.new_empty((c, n)),
    )  # fmt: skip


def _supports_triton(
    means: torch.Tensor, quats: torch.Tensor, scales: torch.Tensor, opacities: torch.Tensor | None,
    viewmats: torch.Tensor, Ks: torch.Tensor, *_: Any, **__: Any,
) -> str | None:  # fmt: skip
    given = [t for t in (means, quats, scales, opacities, viewmats, Ks) if t is not None]
    wrong = {t.dtype for t in given} - {torch.float32}
    if wrong:
        return f"the kernel is for float32, not {', '.join(map(str, wrong))}"
    return None


def _triton(
    means: torch.Tensor, quats: torch.Tensor, scales: torch.Tensor, opacities: torch.Tensor | None,
    viewmats: torch.Tensor, Ks: torch.Tensor, width: int, height: int, eps2d: float = 0.3, near_plane: float = 0.01,
    far_plane: float = 1e10, radius_clip: float = 0.0,
) -> Projected:  # fmt: skip
    _check(means, quats, scales, opacities, viewmats, Ks, width, height)
    made = _fake(means, quats, scales, opacities, viewmats)
    n, c = len(means), len(viewmats)
    if n and c:
        launch_kernel(
            _project_kernel, (cdiv(n, 256), c), means.contiguous(), quats.contiguous(), scales.contiguous(),
            None if opacities is None else opacities.contiguous(), viewmats.contiguous(), Ks.contiguous(), *made, n,
            width, height, float(eps2d), float(near_plane), float(far_plane), float(radius_clip), LEAST_ALPHA, EXTENT,
            MARGIN * 0.5, HAS_OPACITY=opacities is not None, BLOCK=256, num_warps=4,
        )  # fmt: skip
    return made


project_gaussians = define(
    "project_gaussians(Tensor means, Tensor quats, Tensor scales, Tensor? opacities, Tensor viewmats, Tensor Ks,"
    " SymInt width, SymInt height, float eps2d=0.3, float near_plane=0.01, float far_plane=1e10,"
    " float radius_clip=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """A scene without Gaussians whose radii or visibility a rounding error would change."""
    made = scene(call["gaussians"], call.generator, 0)
    views, ks = cameras(call["cameras"], call["width"], call["height"], call.generator)
    parts = [made.means, made.quats, made.scales, made.opacities]
    opacities = made.opacities if call["opaque"] else None
    sizes = (
        call["width"],
        call["height"],
        call["eps2d"],
        call["near_plane"],
        call["far_plane"],
        call["radius_clip"],
    )
    firm = torch.ones(call["gaussians"], dtype=torch.bool, device=call.device)
    first, quats, scales = (t.double() for t in parts[:3])
    rest = None if opacities is None else opacities.double(), views.double(), ks.double()
    want = reference(first, quats, scales, *rest, *sizes)[0]
    for factor in (0.998, 1.002):
        near = reference(first * factor, quats, scales * factor, *rest, *sizes)[0]
        firm &= (near == want).all(-1).all(0)
    if firm.any():  # others become copies of one that is firm
        chosen = torch.where(firm, torch.arange(len(firm), device=call.device), firm.nonzero()[0, 0])
        parts = [t[chosen] for t in parts]
    found = {"means": parts[0], "quats": parts[1], "scales": parts[2], "viewmats": views, "Ks": ks}
    return {**found, "opacities": parts[3]} if call["opaque"] else found


def _case(name: str, tag: str, gaussians: int, cameras: int, width: int, height: int, **more: Any) -> Case:
    weight = more.pop("weight", 1)
    dims = {"gaussians": gaussians, "cameras": cameras, "width": width, "height": height, **more}
    return Case(name, dims, "float32", weight, (tag,))


SPEC = OpSpec(
    name="project_gaussians",
    level=1,
    reference=reference,
    op=project_gaussians,
    arguments=(
        Tensor("means", "gaussians 3"),
        Tensor("quats", "gaussians 4"),
        Tensor("scales", "gaussians 3"),
        Tensor("opacities", "gaussians", when="opaque"),
        Tensor("viewmats", "cameras 4 4"),
        Tensor("Ks", "cameras 3 3"),
        Scalar("width"),
        Scalar("height"),
        Scalar("eps2d", default=0.3),
        Scalar("near_plane", default=0.01),
        Scalar("far_plane", default=1e10),
        Scalar("radius_clip", default=0.0),
    ),
    outputs=(
        Tensor("radii", "cameras gaussians 2", "int32"),
        Tensor("means2d", "cameras gaussians 2"),
        Tensor("depths", "cameras gaussians"),
        Tensor("conics", "cameras gaussians 3"),
        Tensor("compensations", "cameras gaussians"),
    ),
    axes={
        "gaussians": Axis.count(), "cameras": Axis.per_call(), "width": Axis.per_call(), "height": Axis.per_call(),
        "opaque": Axis.option(True),
    },
    values=_values,
    flops="150 * cameras * gaussians",
    cases=(  # 3DGS at 1080p: a trained indoor scene has about 1M Gaussians, an outdoor one up to 6M
        _case("million_1080p", "model", 1_000_000, 1, 1920, 1080, weight=8),
        _case("million_4_views", "model", 1_000_000, 4, 1920, 1080, weight=4),
        _case("outdoor_1080p", "model", 6_000_000, 1, 1920, 1080),
        _case("one", "odd", 1, 1, 16, 16),
        _case("odd_63", "odd", 63, 1, 64, 48),
        _case("odd_1000", "odd", 1000, 2, 100, 60),
        _case("odd_1128", "odd", 1128, 1, 33, 97, radius_clip=2.0),
        _case("no_opacities", "odd", 257, 3, 64, 64, opaque=False),
        _case("planes", "odd", 300, 1, 64, 64, near_plane=2.0, far_plane=3.0),
        _case("blurred", "odd", 129, 1, 80, 40, eps2d=1.5),
        _case("none", "odd", 0, 2, 32, 32),
    ),
    tolerance={"float32": Tolerance(2e-4, 1e-4)},
    tie_sensitive=True,
    permutable=lambda *args: Permutable(rows=(0, 1, 2) if args[3] is None else (0, 1, 2, 3)),
    activations=("means",),
    baseline="reference",
)  # fmt: skip
