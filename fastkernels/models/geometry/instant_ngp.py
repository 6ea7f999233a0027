"""Instant-NGP's radiance fields: Mueller et al., arXiv 2201.05989. Reads snapshots (.ingp, .msgpack) of instant-ngp.

A folder with such a file needs no config.json. Of safetensors, config.json is

    {"architectures": ["InstantNGP"], "model_type": "instant_ngp", "dtype": "float16", "aabb_scale": 1, "levels": 16,
     "features_per_level": 2, "base_resolution": 16, "per_level_scale": 1.3819, "log2_hashmap_size": 19, "width": 64,
     "density_layers": 1, "color_layers": 2, "sh_degree": 3, "grid": 128, "scale": 1.0, "offset": [0, 0, 0]}

and the keys are `table` [rows, features], `density_net` and `color_net`, flat matrices [out, in] in order, and
`density_grid`, the cells of all cascades in Morton order. A camera's world is turned into the field's cube by scale and
offset; the axes stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.checkpoints.radiance_field import COLOR_OUT, DENSITY_OUT, padded, sizes_of
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.interfaces.camera import Camera, rays, stacked
from fastkernels.overrides.geometry.composite_rays import composite_rays
from fastkernels.overrides.geometry.fused_mlp import fused_mlp
from fastkernels.overrides.geometry.hash_encoding import hash_encoding
from fastkernels.overrides.geometry.march_rays import march_rays, morton
from fastkernels.overrides.geometry.spherical_harmonics import basis

LEAST_DENSITY = 0.01  # of an occupied cell
LEAST_LIGHT = 1e-4  # of a ray that goes on
SAMPLES, RAYS = 16, 1 << 20  # of a ray at once, and rays at once


class InstantNGP(nn.Module):
    """config: the fields of read_config."""

    ops = ("hash_encoding", "fused_mlp", "march_rays", "composite_rays")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        sizes = sizes_of(vars(config))
        features = config.features_per_level
        self.density_net = nn.Parameter(torch.empty(sizes["density_net"]))
        self.color_net = nn.Parameter(torch.empty(sizes["color_net"]))
        self.table = nn.Parameter(torch.empty(sizes["table"] // features, features))
        self.density_grid = nn.Parameter(torch.empty(config.cascades * config.grid**3))
        self.cone_angle = 0.0 if config.aabb_scale == 1 else 1 / 256
        self.bits = torch.empty(0, dtype=torch.uint8)

    def ready(self, folder: Path, dummy: bool) -> None:
        """See models/common/interfaces/camera.py."""
        if dummy:
            self._fill()
        self.refresh()

    def refresh(self) -> None:
        """See models/common/interfaces/camera.py: the bits of occupied cells."""
        config = self.config
        density = self.density_grid.data.float().view(config.cascades, -1)
        mean = float(density[0].clamp_min(0).mean())
        found = density > min(LEAST_DENSITY, mean)
        for i in range(1, config.cascades):  # a cell is occupied if one of its eighths in the finer grid is
            found[i] |= self._coarser(found[i - 1])
        weights = torch.arange(8, device=found.device)
        self.bits = (found.view(-1, 8).long() << weights).sum(1).to(torch.uint8)

    def _coarser(self, cells: torch.Tensor) -> torch.Tensor:
        """The cells of the next grid, whose middle the given grid covers; both in Morton order."""
        grid = self.config.grid
        eighths = cells.view(-1, 8).any(1)  # of the grid's (grid / 2) ** 3 blocks, in Morton order, too
        half = torch.arange(grid // 2, device=cells.device)
        z, y, x = torch.meshgrid(half, half, half, indexing="ij")
        made, quarter = torch.zeros_like(cells), grid // 4
        made[morton(x + quarter, y + quarter, z + quarter)] = eighths[morton(x, y, z)]
        return made

    def _fill(self) -> None:
        """A seeded cloud: half of a ball in the cube is occupied."""
        config, generator = self.config, torch.Generator().manual_seed(0)
        for net in (self.density_net, self.color_net):
            net.data.copy_(torch.randn(net.shape, generator=generator) * config.width**-0.5)
        self.table.data.copy_(torch.rand(self.table.shape, generator=generator) * 4 - 2)
        side = (torch.arange(config.grid) + 0.5) / config.grid - 0.5
        z, y, x = torch.meshgrid(side, side, side, indexing="ij")
        cells = torch.arange(config.grid)
        cz, cy, cx = torch.meshgrid(cells, cells, cells, indexing="ij")
        filled = torch.zeros(config.cascades, config.grid**3)
        ball = (x * x + y * y + z * z < 0.16) & (torch.rand(x.shape, generator=generator) < 0.5)
        filled[0, morton(cx, cy, cz)] = ball.float()
        self.density_grid.data.copy_(filled.view(-1))

    def query(self, places: torch.Tensor, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(colors [N, 3], densities [N]) in float32 at places [N, 3] of the cube, seen along directions [N, 3]."""
        config = self.config
        x = ((places - 0.5) / config.aabb_scale + 0.5).clamp(0, 1)
        features = hash_encoding(
            x,
            self.table,
            config.levels,
            config.base_resolution,
            config.per_level_scale,
            config.log2_hashmap_size,
        )
        hidden = fused_mlp(_pad(features), self.density_net, config.width, config.density_layers, DENSITY_OUT)
        seen = basis(directions, config.sh_degree).to(hidden.dtype)
        colors = fused_mlp(
            _pad(torch.cat((hidden, seen), 1), 1.0),
            self.color_net,
            config.width,
            config.color_layers,
            COLOR_OUT,
        )
        return colors[:, :3].float().sigmoid(), hidden[:, 0].float().exp()

    def render(self, cameras: Sequence[Camera]) -> list[torch.Tensor]:
        """See models/common/interfaces/camera.py."""
        width, height = cameras[0].size
        views, ks, backgrounds = stacked(cameras, self.table.device)
        made = []
        for i in range(len(cameras)):
            origins, directions = rays(views[i : i + 1], ks[i : i + 1], width, height)
            parts = [self(o, d) for o, d in zip(origins.split(RAYS), directions.split(RAYS), strict=True)]
            found = torch.cat(parts)
            image = torch.cat((found[:, :3] + (1 - found[:, 3:]) * backgrounds[i], found[:, 3:]), 1)
            made.append(image.view(height, width, 4))
        return made

    def forward(self, origins: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        """Colors and opacities [R, 4] of rays of unit length in the camera's world, on black."""
        config, device = self.config, origins.device
        origins = origins * config.scale + torch.tensor(config.offset, dtype=origins.dtype, device=device)
        half = 0.5 * config.aabb_scale
        inverse = 1 / torch.where(directions == 0, 1e-20, directions)
        first, second = (0.5 - half - origins) * inverse, (0.5 + half - origins) * inverse
        t = first.minimum(second).amax(1).clamp_min(0)
        end = first.maximum(second).amin(1)
        color, light = origins.new_zeros(len(origins), 3), origins.new_ones(len(origins))
        live = (t < end).nonzero()[:, 0]
        while len(live):
            o, d = origins[live], directions[live]
            at, steps, after = march_rays(
                o, d, t[live], end[live], self.bits, SAMPLES, config.grid, config.cascades, self.cone_angle
            )
            there = (steps > 0).nonzero(as_tuple=True)
            colors, densities = at.new_zeros(*at.shape, 3), torch.zeros_like(at)
            if len(there[0]):
                way = d[there[0]]
                colors[there], densities[there] = self.query(o[there[0]] + at[there][:, None] * way, way)
            added, left = composite_rays(colors, densities, steps, light[live])
            color[live] += added
            t[live], light[live] = after, left
            live = live[(left > LEAST_LIGHT) & (after < end[live]) & (after > at[:, 0])]
        return torch.cat((color, 1 - light[:, None]), 1)


def _pad(x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """Columns up to a multiple of 16, as tiny-cuda-nn fills them."""
    missing = padded(x.shape[1]) - x.shape[1]
    return F.pad(x, (0, missing), value=value) if missing else x


ARCH = Architecture(
    names=("InstantNGP",),
    category="geometry",
    model="InstantNGP",
    runner="Render",
    inputs="cameras",
    model_type="instant_ngp",
    packed={},
    own_config="fastkernels.models.common.checkpoints.radiance_field:read_config",
)
