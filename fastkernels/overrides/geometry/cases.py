"""Synthetic scenes: Gaussians, cameras around them, and occupied cells. The same generator gives the same values.

The statistics are those of trained scenes: sizes are log-normal over two decades, most Gaussians are flat or thin,
opacities are mostly low with a second peak near 1, and the density falls with the distance from the center.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

LOG_SIZE, SIZE_SPREAD, AXIS_SPREAD = (
    -5.6,
    0.7,
    0.7,
)  # of log(scale) at a million; the scene's radius is about 1
REST_STD = 0.04  # of SH coefficients beyond the first


@dataclass(frozen=True)
class Scene:
    """means [N, 3], quats [N, 4] (w first), scales [N, 3], opacities [N], coeffs [N, (degree + 1) ** 2, 3]; float32."""

    means: torch.Tensor
    quats: torch.Tensor
    scales: torch.Tensor
    opacities: torch.Tensor
    coeffs: torch.Tensor


def scene(count: int, generator: torch.Generator, degree: int = 3) -> Scene:
    """Gaussians on noisy surfaces around the origin, with a background farther out."""
    device = generator.device

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    def rand(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, device=device)

    # Most lie near spheres of different radii, as surfaces do
    radius = torch.where(rand(count) < 0.75, 0.3 + 0.7 * rand(count), 4.0 + 6.0 * rand(count) ** 2)
    means = F.normalize(randn(count, 3), dim=-1) * (radius * (1 + 0.02 * randn(count)))[:, None]
    size = LOG_SIZE - math.log(max(count, 1) / 1e6) / 6  # more Gaussians are smaller
    logs = size + SIZE_SPREAD * randn(count, 1) + AXIS_SPREAD * randn(count, 3)
    scales = (logs + radius.clamp_min(1).log()[:, None]).exp().clamp_max(0.5)
    opaque = rand(count) < 0.3
    opacities = torch.where(opaque, 4.0 + randn(count), -1.5 + 1.2 * randn(count)).sigmoid()
    coeffs = REST_STD * randn(count, (degree + 1) ** 2, 3)
    coeffs[:, 0] = 1.2 * randn(count, 3)
    return Scene(means, randn(count, 4), scales, opacities, coeffs)


def cameras(
    count: int, width: int, height: int, generator: torch.Generator, distance: float = 2.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """(viewmats [C, 4, 4], intrinsics [C, 3, 3]) of cameras on a ring, which look at the origin with 50 degrees."""
    device = generator.device
    angle = 2 * math.pi * torch.rand(count, generator=generator, device=device)
    height_of = 0.6 * torch.rand(count, generator=generator, device=device) - 0.3
    position = distance * torch.stack((angle.cos(), height_of, angle.sin()), -1)
    forward = F.normalize(-position, dim=-1)
    down = torch.tensor([0.0, 1.0, 0.0], device=device).expand_as(forward)
    right = F.normalize(torch.cross(down, forward, dim=-1), dim=-1)
    rotation = torch.stack(
        (right, torch.cross(forward, right, dim=-1), forward), 1
    )  # [C, 3, 3], rows: x, y, z
    viewmats = torch.eye(4, device=device).repeat(count, 1, 1)
    viewmats[:, :3, :3] = rotation
    viewmats[:, :3, 3] = -(rotation @ position[:, :, None])[..., 0]
    focal = 0.5 * max(width, height) / math.tan(math.radians(25))
    intrinsics = torch.tensor([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1.0]], device=device)
    return viewmats, intrinsics.expand(count, 3, 3).clone()
