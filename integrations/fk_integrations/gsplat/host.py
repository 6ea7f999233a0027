"""gsplat: projection, colors, tiles and rasterization of 3-D Gaussians, for all callers in the process."""

from __future__ import annotations

from fk_integrations.patching.function_host import FunctionHost

HOST = FunctionHost("gsplat")
