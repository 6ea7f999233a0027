"""Drop-in functions for gsplat: what `gsplat.rasterization` calls. Inference only: the library's run for gradients."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fastkernels.core.spec import Target
from fastkernels.overrides.geometry.intersect_tiles import intersect_tiles, tiles_per_gaussian
from fastkernels.overrides.geometry.project_gaussians import project_gaussians
from fastkernels.overrides.geometry.rasterize_gaussians import MOST_COLORS, rasterize_gaussians
from fastkernels.overrides.geometry.spherical_harmonics import MOST_DEGREE, spherical_harmonics
from fastkernels.overrides.kit.arguments import UnsupportedArgument


def _refuse(**wrong: bool) -> None:
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise UnsupportedArgument(f"{name} is not supported")


def _check_floats(*given: Tensor | None) -> None:
    tensors = [t for t in given if t is not None]
    if any(t.dtype != torch.float32 for t in tensors):
        raise UnsupportedArgument("a tensor is not float32")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedArgument("gradients are not supported")


def gsplat_fully_fused_projection(
    means: Tensor,
    covars: Tensor | None,
    quats: Tensor | None,
    scales: Tensor | None,
    viewmats: Tensor,
    Ks: Tensor,
    width: int,
    height: int,
    eps2d: float = 0.3,
    near_plane: float = 0.01,
    far_plane: float = 1e10,
    radius_clip: float = 0.0,
    packed: bool = False,
    sparse_grad: bool = False,
    calc_compensations: bool = False,
    camera_model: Literal["pinhole", "ortho", "fisheye", "ftheta"] = "pinhole",
    opacities: Tensor | None = None,
) -> Any:
    """Gaussians with means [N, 3], quats [N, 4] and scales [N, 3] as C cameras see them; those off the image are 0."""
    if quats is None or scales is None or covars is not None:
        raise UnsupportedArgument("covars in place of quats and scales are not supported")
    _refuse(
        camera_model=camera_model != "pinhole",
        batches=means.dim() != 2 or viewmats.dim() != 3,
        opacities_with_compensations=opacities is not None and calc_compensations,
    )
    _check_floats(means, quats, scales, viewmats, Ks, opacities)
    radii, means2d, depths, conics, compensations = project_gaussians(
        means,
        quats,
        scales,
        opacities,
        viewmats,
        Ks,
        width,
        height,
        eps2d,
        near_plane,
        far_plane,
        radius_clip,
    )
    extra = compensations if calc_compensations else None
    if not packed:
        return radii, means2d, depths, conics, extra
    cameras, gaussians = (radii > 0).all(-1).nonzero(as_tuple=True)
    kept = (t[cameras, gaussians] for t in (radii, means2d, depths, conics))
    extra = None if extra is None else extra[cameras, gaussians]
    return torch.zeros_like(cameras), cameras, gaussians, *kept, extra


def gsplat_spherical_harmonics(
    degrees_to_use: int, dirs: Tensor, coeffs: Tensor, masks: Tensor | None = None
) -> Tensor:
    """dirs [..., 3] and coeffs [..., K, 3] to colors [..., 3]; 0 where masks [...] is false."""
    assert (degrees_to_use + 1) ** 2 <= coeffs.shape[-2], coeffs.shape
    assert coeffs.shape == (*dirs.shape[:-1], coeffs.shape[-2], 3), coeffs.shape
    _refuse(degrees_to_use=not 0 <= degrees_to_use <= MOST_DEGREE)
    _check_floats(dirs, coeffs)
    while coeffs.dim() > 3 and (coeffs.shape[0] == 1 or coeffs.stride(0) == 0):  # the same for all cameras
        coeffs = coeffs[0]
    return spherical_harmonics(dirs, coeffs, degrees_to_use, masks)


def gsplat_isect_tiles(
    means2d: Tensor,
    radii: Tensor,
    depths: Tensor,
    tile_size: int,
    tile_width: int,
    tile_height: int,
    sort: bool = True,
    segmented: bool = False,
    packed: bool = False,
    n_images: int | None = None,
    image_ids: Tensor | None = None,
    gaussian_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(tiles of each Gaussian, 64-bit ids of intersections, Gaussians' numbers), sorted by image, tile and depth."""
    _refuse(sort=not sort, packed_images=packed and n_images != 1)
    _check_floats(means2d, depths)
    shape = depths.shape
    count, n = shape[:-1].numel(), shape[-1]  # n is 0 if no camera sees a packed Gaussian
    means2d, radii = means2d.reshape(count, n, 2), radii.reshape(count, n, 2)
    depths = depths.reshape(count, n)
    counts = tiles_per_gaussian(means2d, radii, tile_size, tile_width, tile_height)
    total = int(counts.sum(dtype=torch.int64))
    ids, offsets = intersect_tiles(means2d, radii, depths, tile_size, tile_width, tile_height, total)
    tiles = tile_width * tile_height
    place = torch.arange(total, device=ids.device, dtype=torch.int32)
    tile = torch.searchsorted(offsets[1:], place, right=True)
    key = (tile // tiles << tiles.bit_length()) | tile % tiles
    bits = depths.reshape(-1)[ids.long()].view(torch.int32).long() & 0xFFFFFFFF
    return counts.reshape(shape), (key << 32) | bits, ids


def gsplat_isect_offset_encode(isect_ids: Tensor, n_images: int, tile_width: int, tile_height: int) -> Tensor:
    """The first intersection of each tile, [n_images, tile_height, tile_width] int32."""
    tiles = tile_width * tile_height
    tile = torch.arange(n_images * tiles, device=isect_ids.device)
    first = ((tile // tiles << tiles.bit_length()) | tile % tiles) << 32
    found = torch.searchsorted(isect_ids.contiguous(), first, out_int32=True)
    return found.view(n_images, tile_height, tile_width)


def gsplat_rasterize_to_pixels(
    means2d: Tensor,
    conics: Tensor,
    colors: Tensor,
    opacities: Tensor,
    image_width: int,
    image_height: int,
    tile_size: int,
    isect_offsets: Tensor,
    flatten_ids: Tensor,
    backgrounds: Tensor | None = None,
    masks: Tensor | None = None,
    packed: bool = False,
    absgrad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Colors [..., H, W, D] and alphas [..., H, W, 1] of the images."""
    channels, n = colors.shape[-1], means2d.shape[-2]
    tall, wide = isect_offsets.shape[-2:]
    images = isect_offsets.shape[:-2]
    count = images.numel()
    _refuse(
        masks=masks is not None,
        absgrad=absgrad,
        tile_size=tile_size not in (8, 16),
        channels=not 0 < channels <= MOST_COLORS,
        packed_images=packed and count != 1,
        larger_grid=(tall, wide) != (-(-image_height // tile_size), -(-image_width // tile_size)),
    )
    _check_floats(means2d, conics, colors, opacities, backgrounds)
    end = isect_offsets.new_tensor([len(flatten_ids)])
    out, alphas = rasterize_gaussians(
        means2d.reshape(count, n, 2), conics.reshape(count, n, 3), colors.reshape(count, n, channels),
        opacities.reshape(count, n), image_width, image_height, tile_size, torch.cat((isect_offsets.reshape(-1), end)),
        flatten_ids, None if backgrounds is None else backgrounds.reshape(count, channels),
    )  # fmt: skip
    size = (*images, image_height, image_width)
    return out.reshape(*size, channels), alphas.reshape(*size, 1)


_WRAPPER = "gsplat.cuda._wrapper"
TARGETS = {
    "project_gaussians": (
        Target(
            "gsplat", f"{_WRAPPER}:fully_fused_projection", "gsplat_fully_fused_projection", "library_function",
        ),
    ),
    "spherical_harmonics": (
        Target("gsplat", f"{_WRAPPER}:spherical_harmonics", "gsplat_spherical_harmonics", "library_function"),
    ),
    "intersect_tiles": (
        Target("gsplat", f"{_WRAPPER}:isect_tiles", "gsplat_isect_tiles", "library_function"),
        Target("gsplat", f"{_WRAPPER}:isect_offset_encode", "gsplat_isect_offset_encode", "library_function"),
    ),
    "rasterize_gaussians": (
        Target("gsplat", f"{_WRAPPER}:rasterize_to_pixels", "gsplat_rasterize_to_pixels", "library_function"),
    ),
}  # fmt: skip
