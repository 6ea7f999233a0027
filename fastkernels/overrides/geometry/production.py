"""Baselines of this family: gsplat's CUDA kernels, cuBLAS layer by layer, and compiled PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, Function, inductor
from fastkernels.overrides.geometry.fused_mlp import layers
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.libraries import T, from_torch


def _harmonics() -> Function:
    from gsplat import spherical_harmonics

    return lambda dirs, coeffs, degree, masks=None: spherical_harmonics(degree, dirs, coeffs, masks)


def _no_harmonics(dirs: T, coeffs: T, degree: int, masks: T | None = None) -> str | None:
    if masks is not None:
        return "gsplat leaves masked rows unwritten"
    return None if dirs.dim() + 1 == coeffs.dim() else "gsplat has coefficients for each direction"


def _intersect() -> Function:
    from gsplat import isect_offset_encode, isect_tiles

    def run(means2d: T, radii: T, depths: T, size: int, wide: int, tall: int, capacity: int) -> tuple[T, T]:
        _, keys, ids = isect_tiles(means2d, radii, depths, size, wide, tall)
        offsets = isect_offset_encode(keys, len(depths), wide, tall).reshape(-1)
        ended = torch.cat((offsets, offsets.new_tensor([len(ids)])))
        return F.pad(ids, (0, capacity - len(ids)), value=-1), ended

    return run


def _rasterize() -> Function:
    from gsplat import rasterize_to_pixels

    def run(
        means2d: T, conics: T, colors: T, opacities: T, width: int, height: int, size: int, offsets: T, ids: T,
        backgrounds: T | None = None,
    ) -> tuple[T, T]:  # fmt: skip
        grid = offsets[:-1].view(len(means2d), cdiv(height, size), cdiv(width, size))
        return rasterize_to_pixels(
            means2d,
            conics,
            colors,
            opacities,
            width,
            height,
            size,
            grid,
            ids[: int(offsets[-1])],
            backgrounds,
        )

    return run


def _layer_by_layer(x: T, weights: T, width: int, hidden: int, outputs: int) -> T:
    *inner, last = layers(weights, x.shape[1], width, hidden, outputs)
    for w in inner:
        x = F.linear(x, w).relu_()
    return F.linear(x, last)


def _gsplat(make: Any, **more: Any) -> Baseline:
    return Baseline("gsplat", "library", make, modules=("gsplat",), **more)


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "project_gaussians": (inductor("project_gaussians"),),
    "spherical_harmonics": (_gsplat(_harmonics, refuses=_no_harmonics), inductor("spherical_harmonics")),
    "intersect_tiles": (_gsplat(_intersect),),
    "rasterize_gaussians": (_gsplat(_rasterize),),
    "hash_encoding": (inductor("hash_encoding"),),
    "fused_mlp": from_torch(_layer_by_layer),
    "composite_rays": (inductor("composite_rays"),),
}
