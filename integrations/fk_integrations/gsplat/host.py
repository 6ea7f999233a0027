"""gsplat: projection, colors, tiles and rasterization of 3-D Gaussians, for all callers in the process."""

from __future__ import annotations

from fk_integrations.patching.function_host import FunctionHost

_WRAPPER = "gsplat.cuda._wrapper"
_FLAT, _UNSCENTED = "2-D Gaussians", "cameras with distortion (with_ut, with_eval3d)"
HOST = FunctionHost(
    "gsplat",
    unserved={
        "project_gaussians": {
            f"{_WRAPPER}:fully_fused_projection_2dgs": _FLAT,
            f"{_WRAPPER}:fully_fused_projection_with_ut": _UNSCENTED,
        },
        "rasterize_gaussians": {
            f"{_WRAPPER}:rasterize_to_pixels_2dgs": _FLAT,
            f"{_WRAPPER}:rasterize_to_pixels_eval3d": _UNSCENTED,
        },
    },
)
