"""3-D Gaussian splatting: Kerbl et al., arXiv 2308.04079. Reads point_cloud.ply of 3DGS and checkpoints of gsplat.

A folder with such a file needs no config.json. Of safetensors, the keys are gsplat's and config.json is

    {"architectures": ["GaussianSplatting"], "model_type": "gaussian_splatting", "dtype": "float32",
     "num_gaussians": 1000000, "sh_degree": 3, "antialiased": false, "eps2d": 0.3, "near_plane": 0.01}

As in these files, `scales` are logarithms and `opacities` logits. Fields that are left out have these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.camera import Camera, stacked
from fastkernels.overrides.geometry.cases import scene
from fastkernels.overrides.geometry.intersect_tiles import intersect_tiles, tiles_per_gaussian
from fastkernels.overrides.geometry.project_gaussians import project_gaussians
from fastkernels.overrides.geometry.rasterize_gaussians import rasterize_gaussians
from fastkernels.overrides.geometry.spherical_harmonics import MOST_DEGREE, spherical_harmonics
from fastkernels.overrides.kit.launch import cdiv

TILE = 16
AT_ONCE = 1 << 24  # Gaussians times cameras that are projected at once, 44 bytes each
ROUNDED = 1 << 16  # capacities are its multiples, so that PyTorch's allocator finds the same blocks again
DEFAULTS: dict[str, Any] = {
    "num_gaussians": 1_000_000, "sh_degree": 3, "antialiased": False, "eps2d": 0.3, "near_plane": 0.01,
}  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, checked, with defaults. Raises Unsupported, which names the field and the value."""
    made = {**DEFAULTS, **raw}
    count, degree = made["num_gaussians"], made["sh_degree"]
    if type(count) is not int or count < 1:
        raise Unsupported(f"config.num_gaussians={count!r} is not supported, only integers above 0")
    if type(degree) is not int or not 0 <= degree <= MOST_DEGREE:
        raise Unsupported(f"config.sh_degree={degree!r} is not supported, only 0 to {MOST_DEGREE}")
    if type(made["antialiased"]) is not bool:
        raise Unsupported(f"config.antialiased={made['antialiased']!r} is not supported, only true or false")
    if made.get("dtype", "float32") != "float32":
        raise Unsupported(f"config.dtype={made['dtype']!r} is not supported, only 'float32'")
    for name in ("eps2d", "near_plane"):
        if type(made[name]) not in (int, float) or not 0 < made[name] < 1e6:
            raise Unsupported(f"config.{name}={made[name]!r} is not supported, only numbers above 0")
    return made


class GaussianSplatting(nn.Module):
    """config: the fields of read_config."""

    ops = ("project_gaussians", "spherical_harmonics", "intersect_tiles", "rasterize_gaussians")

    def __init__(self, config: Any) -> None:
        super().__init__()
        n, bands = config.num_gaussians, (config.sh_degree + 1) ** 2
        self.degree, self.antialiased = config.sh_degree, config.antialiased
        self.eps2d, self.near_plane = float(config.eps2d), float(config.near_plane)
        self.means = nn.Parameter(torch.empty(n, 3))
        self.quats = nn.Parameter(torch.empty(n, 4))
        self.scales = nn.Parameter(torch.empty(n, 3))
        self.opacities = nn.Parameter(torch.empty(n))
        # No parameter, as checkpoints have two: those are its parts.
        self.coeffs = torch.empty(n, bands, 3)
        self.sh0 = nn.Parameter(self.coeffs[:, :1])
        self.shN = nn.Parameter(self.coeffs[:, 1:])

    def ready(self, folder: Path, dummy: bool) -> None:
        """See models/common/interfaces/camera.py. Weights become values: dummy ones those of a synthetic scene."""
        if not dummy:
            self.scales.data.exp_()
            self.opacities.data.sigmoid_()
            return
        made = scene(len(self.means), torch.Generator().manual_seed(0), self.degree)
        for ours, values in (
            (self.means, made.means), (self.quats, made.quats), (self.scales, made.scales),
            (self.opacities, made.opacities), (self.coeffs, made.coeffs),
        ):  # fmt: skip
            ours.data.copy_(values)

    def refresh(self) -> None:
        """See models/common/interfaces/camera.py."""

    def render(self, cameras: Sequence[Camera]) -> list[torch.Tensor]:
        """See models/common/interfaces/camera.py."""
        size = max(AT_ONCE // len(self.means), 1)
        parts = [cameras[i : i + size] for i in range(0, len(cameras), size)]
        return [
            image for part in parts for image in self(*stacked(part, self.means.device), *cameras[0].size)
        ]

    def forward(
        self, viewmats: torch.Tensor, Ks: torch.Tensor, backgrounds: torch.Tensor, width: int, height: int
    ) -> torch.Tensor:
        """Images [C, height, width, 4]: colors on the backgrounds [C, 3], and opacity."""
        count, n, opacities = len(viewmats), len(self.means), self.opacities
        radii, means2d, depths, conics, compensations = project_gaussians(
            self.means,
            self.quats,
            self.scales,
            opacities,
            viewmats,
            Ks,
            width,
            height,
            self.eps2d,
            self.near_plane,
        )
        places = -torch.einsum("cji,cj->ci", viewmats[:, :3, :3], viewmats[:, :3, 3])
        seen = (radii > 0).all(-1)
        shown = spherical_harmonics(self.means - places[:, None], self.coeffs, self.degree, seen)
        colors = (shown + 0.5).clamp_min_(0)
        each = opacities * compensations if self.antialiased else opacities.expand(count, n)
        tiles = cdiv(width, TILE), cdiv(height, TILE)
        needed = int(tiles_per_gaussian(means2d, radii, TILE, *tiles).sum(dtype=torch.int64))
        ids, offsets = intersect_tiles(means2d, radii, depths, TILE, *tiles, cdiv(needed, ROUNDED) * ROUNDED)
        color, alpha = rasterize_gaussians(
            means2d, conics, colors, each, width, height, TILE, offsets, ids, backgrounds
        )
        return torch.cat((color, alpha), -1)


ARCH = Architecture(
    names=("GaussianSplatting",),
    category="geometry",
    model="GaussianSplatting",
    runner="Render",
    inputs="cameras",
    model_type="gaussian_splatting",
    packed={},
    prefixes={"splats.": ""},
    own_config="fastkernels.models.geometry.gaussian_splatting:read_config",
)
