"""Real spherical harmonics: the color of a Gaussian by the direction to it (arXiv 2308.04079), to degree 4.

The basis is that of Sloan, Efficient Spherical Harmonic Evaluation, JCGT 2(2), 2013, with the signs of 3DGS.
"""

from __future__ import annotations

from types import SimpleNamespace
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

MOST_DEGREE = 4


def basis(directions: torch.Tensor, degree: int) -> torch.Tensor:
    """directions: [..., 3] of length 1. Returns the values of the (degree + 1) ** 2 functions, [..., K]."""
    x, y, z = directions.unbind(-1)
    xx, yy, zz = x * x, y * y, z * z
    made = [torch.full_like(x, 0.28209479177387814)]
    if degree > 0:
        made += [-0.4886025119029199 * y, 0.4886025119029199 * z, -0.4886025119029199 * x]
    if degree > 1:
        made += [
            1.0925484305920792 * x * y, -1.0925484305920792 * y * z, 0.31539156525252005 * (3 * zz - 1),
            -1.0925484305920792 * x * z, 0.5462742152960396 * (xx - yy),
        ]  # fmt: skip
    if degree > 2:
        made += [
            -0.5900435899266435 * y * (3 * xx - yy), 2.890611442640554 * x * y * z,
            -0.4570457994644658 * y * (5 * zz - 1), 0.3731763325901154 * z * (5 * zz - 3),
            -0.4570457994644658 * x * (5 * zz - 1), 1.445305721320277 * z * (xx - yy),
            -0.5900435899266435 * x * (xx - 3 * yy),
        ]  # fmt: skip
    if degree > 3:
        made += [
            2.5033429417967046 * x * y * (xx - yy), -1.7701307697799304 * y * z * (3 * xx - yy),
            0.9461746957575601 * x * y * (7 * zz - 1), -0.6690465435572892 * y * z * (7 * zz - 3),
            0.10578554691520431 * (zz * (35 * zz - 30) + 3), -0.6690465435572892 * x * z * (7 * zz - 3),
            0.47308734787878004 * (xx - yy) * (7 * zz - 1), -1.7701307697799304 * x * z * (xx - 3 * yy),
            0.6258357354491761 * (xx * (xx - 3 * yy) - yy * (3 * xx - yy)),
        ]  # fmt: skip
    return torch.stack(made, -1)


def reference(
    dirs: torch.Tensor, coeffs: torch.Tensor, degrees_to_use: int, masks: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums of the first (degrees_to_use + 1) ** 2 functions.

    dirs: [..., M, 3], of any length; coeffs: [..., R, K, 3], whose rows repeat if there are more directions: row m of
    the flattened directions has coefficients m % R; masks: [..., M] bool, false: the row is 0. Returns [..., M, 3] in
    dirs' dtype. Raises ValueError for shapes that do not fit and for degrees outside of 0 .. 4.
    """
    rows = _check(degrees_to_use, dirs, coeffs, masks)
    acc = torch.promote_types(dirs.dtype, torch.float32)
    values = basis(F.normalize(dirs.to(acc).reshape(-1, 3), dim=-1), degrees_to_use)  # [M, K]
    used = coeffs.to(acc).reshape(rows, coeffs.shape[-2], 3)[:, : values.shape[1]]
    times = len(values) // rows if rows else 0
    out = torch.einsum("tmk,mkc->tmc", values.reshape(times, rows, values.shape[1]), used).reshape(dirs.shape)
    return (out if masks is None else out.where(masks[..., None], 0)).to(dirs.dtype)


def _check(degree: int, dirs: torch.Tensor, coeffs: torch.Tensor, masks: torch.Tensor | None) -> int:
    """The number of rows of coefficients."""
    if not 0 <= degree <= MOST_DEGREE:
        raise ValueError(f"spherical_harmonics: degrees_to_use must be from 0 to {MOST_DEGREE}, got {degree}")
    if dirs.dim() < 1 or dirs.shape[-1] != 3 or coeffs.dim() < 2 or coeffs.shape[-1] != 3:
        raise ValueError(
            f"spherical_harmonics: dirs must be [..., 3] and coeffs [..., K, 3], got {list(dirs.shape)} and"
            f" {list(coeffs.shape)}"
        )
    if coeffs.shape[-2] < (degree + 1) ** 2:
        raise ValueError(
            f"spherical_harmonics: degree {degree} needs {(degree + 1) ** 2} coefficients, got {coeffs.shape[-2]}"
        )
    count, rows = dirs.shape[:-1].numel(), coeffs.shape[:-2].numel()
    if count and (not rows or count % rows):
        raise ValueError(f"spherical_harmonics: {rows} rows of coeffs do not divide {count} directions")
    if masks is not None and masks.shape != dirs.shape[:-1]:
        raise ValueError(
            f"spherical_harmonics: masks must be {list(dirs.shape[:-1])}, got {list(masks.shape)}"
        )
    return rows


@triton.jit
def _sum(coeffs, k: tl.constexpr, value, r, g, b, used):
    # Function k of K, for the three channels
    r += value * tl.load(coeffs + 3 * k, mask=used, other=0.0).to(tl.float32)
    g += value * tl.load(coeffs + 3 * k + 1, mask=used, other=0.0).to(tl.float32)
    b += value * tl.load(coeffs + 3 * k + 2, mask=used, other=0.0).to(tl.float32)
    return r, g, b


@triton.jit
def _four(at, used):
    # Four coefficients of each row, read at once: loads of 16 bytes, as far as rows are aligned.
    four = tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=used[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(four, [four.shape[0], 2, 2]))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def _sum_of_four(coeffs, k: tl.constexpr, r, g, b, used, v0, v1, v2, v3):
    # Functions k to k + 3 of K, for the three channels
    r0, g0, b0, r1 = _four(coeffs + 3 * k, used)
    g1, b1, r2, g2 = _four(coeffs + 3 * k + 4, used)
    b2, r3, g3, b3 = _four(coeffs + 3 * k + 8, used)
    r += v0 * r0 + v1 * r1 + v2 * r2 + v3 * r3
    g += v0 * g0 + v1 * g1 + v2 * g2 + v3 * g3
    b += v0 * b0 + v1 * b1 + v2 * b2 + v3 * b3
    return r, g, b


@triton.jit(do_not_specialize=["M", "R"])
def _harmonics_kernel(
    dirs_ptr, coeffs_ptr, masks_ptr, out_ptr, M, R, K, HAS_MASKS: tl.constexpr, DEGREE: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One direction a thread. Rows of coefficients are read where the mask is set only: they are most of the bytes.
    follow(OVERLAP)
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = m < M
    used = here
    if HAS_MASKS:
        used = here & (tl.load(masks_ptr + m, mask=here, other=0) != 0)
    x = tl.load(dirs_ptr + m * 3, mask=used, other=0.0).to(tl.float32)
    y = tl.load(dirs_ptr + m * 3 + 1, mask=used, other=0.0).to(tl.float32)
    z = tl.load(dirs_ptr + m * 3 + 2, mask=used, other=0.0).to(tl.float32)
    inv = 1.0 / tl.maximum(tl.sqrt(x * x + y * y + z * z), 1e-12)
    x, y, z = x * inv, y * inv, z * inv
    xx, yy, zz = x * x, y * y, z * z
    at = coeffs_ptr + (m % R) * K * 3
    r = tl.zeros([BLOCK], tl.float32)
    g = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    if DEGREE == 0:
        r, g, b = _sum(at, 0, 0.28209479177387814, r, g, b, used)
    if DEGREE > 0:
        r, g, b = _sum_of_four(
            at,
            0,
            r,
            g,
            b,
            used,
            0.28209479177387814,
            -0.4886025119029199 * y,
            0.4886025119029199 * z,
            -0.4886025119029199 * x,
        )
    if DEGREE > 1:
        r, g, b = _sum_of_four(
            at,
            4,
            r,
            g,
            b,
            used,
            1.0925484305920792 * x * y,
            -1.0925484305920792 * y * z,
            0.31539156525252005 * (3 * zz - 1),
            -1.0925484305920792 * x * z,
        )
    if DEGREE == 2:
        r, g, b = _sum(at, 8, 0.5462742152960396 * (xx - yy), r, g, b, used)
    if DEGREE > 2:
        r, g, b = _sum_of_four(
            at,
            8,
            r,
            g,
            b,
            used,
            0.5462742152960396 * (xx - yy),
            -0.5900435899266435 * y * (3 * xx - yy),
            2.890611442640554 * x * y * z,
            -0.4570457994644658 * y * (5 * zz - 1),
        )
        r, g, b = _sum_of_four(
            at,
            12,
            r,
            g,
            b,
            used,
            0.3731763325901154 * z * (5 * zz - 3),
            -0.4570457994644658 * x * (5 * zz - 1),
            1.445305721320277 * z * (xx - yy),
            -0.5900435899266435 * x * (xx - 3 * yy),
        )
    if DEGREE > 3:
        r, g, b = _sum_of_four(
            at,
            16,
            r,
            g,
            b,
            used,
            2.5033429417967046 * x * y * (xx - yy),
            -1.7701307697799304 * y * z * (3 * xx - yy),
            0.9461746957575601 * x * y * (7 * zz - 1),
            -0.6690465435572892 * y * z * (7 * zz - 3),
        )
        r, g, b = _sum_of_four(
            at,
            20,
            r,
            g,
            b,
            used,
            0.10578554691520431 * (zz * (35 * zz - 30) + 3),
            -0.6690465435572892 * x * z * (7 * zz - 3),
            0.47308734787878004 * (xx - yy) * (7 * zz - 1),
            -1.7701307697799304 * x * z * (xx - 3 * yy),
        )
        r, g, b = _sum(at, 24, 0.6258357354491761 * (xx * (xx - 3 * yy) - yy * (3 * xx - yy)), r, g, b, used)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + m * 3, tl.where(used, r, 0.0).to(dtype), mask=here)
    tl.store(out_ptr + m * 3 + 1, tl.where(used, g, 0.0).to(dtype), mask=here)
    tl.store(out_ptr + m * 3 + 2, tl.where(used, b, 0.0).to(dtype), mask=here)


def _supports_triton(
    dirs: torch.Tensor, coeffs: torch.Tensor, degrees_to_use: int, *_: Any, **__: Any
) -> str | None:
    if torch.float64 in (dirs.dtype, coeffs.dtype):
        return "the kernel computes in float32, not float64"
    return None


def _triton(
    dirs: torch.Tensor, coeffs: torch.Tensor, degrees_to_use: int, masks: torch.Tensor | None = None
) -> torch.Tensor:
    rows = _check(degrees_to_use, dirs, coeffs, masks)
    out = torch.empty(dirs.shape, dtype=dirs.dtype, device=dirs.device)
    count = out.numel() // 3
    if count:
        launch_kernel(
            _harmonics_kernel, (cdiv(count, 128),), dirs.contiguous(), coeffs.contiguous(),
            None if masks is None else masks.contiguous(), out, count, rows, coeffs.shape[-2],
            HAS_MASKS=masks is not None, DEGREE=degrees_to_use, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


spherical_harmonics = define(
    "spherical_harmonics(Tensor dirs, Tensor coeffs, SymInt degrees_to_use, Tensor? masks=None) -> Tensor",
    fake=lambda dirs, *_: torch.empty(dirs.shape, dtype=dirs.dtype, device=dirs.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _seen(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return call.rand(*shape) < 0.5


def _seen_by_any(args: SimpleNamespace) -> int:
    """Count the Gaussians whose coefficients are read."""
    masks = args.masks
    if masks is None:
        return len(args.coeffs)
    return int((masks.any(0) if masks.dim() == 2 else masks).sum())


def _case(name: str, tag: str, gaussians: int, degree: int = 3, masked: bool = True, **more: Any) -> Case:
    weight, dtype = more.pop("weight", 1), more.pop("dtype", "float32")
    dims = {"gaussians": gaussians, "degrees_to_use": degree, "masked": masked, **more}
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="spherical_harmonics",
    level=1,
    reference=reference,
    op=spherical_harmonics,
    arguments=(
        Tensor("dirs", "cameras? gaussians 3"),
        Tensor("coeffs", "gaussians coefficients 3", bytes="itemsize(dtype) * seen * coefficients * 3"),
        Scalar("degrees_to_use"),
        Tensor("masks", "cameras? gaussians", "bool", when="masked", values=_seen),
    ),
    outputs=(Tensor("out", "cameras? gaussians 3"),),
    axes={
        "gaussians": Axis.count(), "cameras": Axis.per_call(1), "masked": Axis.option(False),
        "coefficients": Axis.option(lambda sizes: (sizes["degrees_to_use"] + 1) ** 2),
        "degrees_to_use": Axis.option(),
        "seen": Axis.counted(_seen_by_any, lambda sizes: sizes["gaussians"]),
    },
    constraints=("coefficients >= (degrees_to_use + 1) * (degrees_to_use + 1)",),
    flops="6 * cameras * gaussians * (degrees_to_use + 1) * (degrees_to_use + 1)",
    cases=(
        _case("million", "model", 1_000_000, weight=8),
        _case("million_4_views", "model", 1_000_000, cameras=4, weight=4),
        _case("outdoor", "model", 6_000_000),
        _case("one", "odd", 1, 0, False),
        _case("odd_63", "odd", 63, 1),
        _case("odd_1000", "odd", 1000, 2, False),
        _case("odd_1128", "odd", 1128, 3),
        _case("degree_4", "odd", 129, 4, cameras=3),
        _case("some_bands", "odd", 257, 1, coefficients=16),
        _case("half", "odd", 65, 3, dtype="float16"),
        _case("none", "odd", 0, 2),
    ),
    tolerance={"float32": Tolerance(1e-5, 1e-5), "float16": Tolerance(4e-3, 4e-3), "bfloat16": Tolerance(3e-2, 3e-2)},
    tie_sensitive=True,  # directions of length 0
    permutable=lambda *args: Permutable(),
    activations=("coeffs",),
    baseline="reference",
)  # fmt: skip
