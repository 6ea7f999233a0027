"""Rasterization of projected Gaussians, front to back, tile by tile: arXiv 2308.04079, section 6."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Permutable
from fastkernels.overrides.geometry import intersect_tiles, project_gaussians
from fastkernels.overrides.geometry.cases import cameras, scene
from fastkernels.overrides.geometry.project_gaussians import LEAST_ALPHA
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MOST_ALPHA = 0.999
LEAST_LIGHT = 1e-4  # a pixel ends before the Gaussian that would leave less of the light behind it
MOST_COLORS = 32  # channels that a program of the Triton kernel accumulates


def reference(
    means2d: torch.Tensor, conics: torch.Tensor, colors: torch.Tensor, opacities: torch.Tensor, image_width: int,
    image_height: int, tile_size: int, offsets: torch.Tensor, flatten_ids: torch.Tensor,
    backgrounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Images of Gaussians, of what project_gaussians and intersect_tiles give.

    means2d: [I, N, 2]; conics: [I, N, 3]; colors: [I, N, D]; opacities: [I, N]; backgrounds: [I, D]. Returns the colors
    [I, image_height, image_width, D] and alphas [I, image_height, image_width, 1]. At the center of a pixel, Gaussian n
    has alpha = min(0.999, opacity * exp(-(q - mean)^T conic (q - mean) / 2)). With T the product of 1 - alpha before
    it, it adds T * alpha * color. Alphas below 1/255 or NaN are left out, and the pixel ends before T would be 1e-4 or
    less. Raises ValueError for shapes that do not fit.
    """
    images, tiles_x, tiles_y = _check(
        means2d, conics, colors, opacities, image_width, image_height, tile_size, offsets, backgrounds
    )
    acc = torch.promote_types(means2d.dtype, torch.float32)
    place, conic = means2d.reshape(-1, 2).to(acc), conics.reshape(-1, 3).to(acc)
    color, opacity = colors.reshape(-1, colors.shape[-1]).to(acc), opacities.reshape(-1).to(acc)
    out = color.new_zeros(images, tiles_y * tile_size, tiles_x * tile_size, color.shape[1])
    light = color.new_ones(*out.shape[:3], 1)
    near = torch.arange(tile_size, device=out.device, dtype=acc) + 0.5
    bounds = offsets.tolist()
    for tile in range(len(bounds) - 1):
        ids = flatten_ids[bounds[tile] : bounds[tile + 1]].long()
        if not len(ids):
            continue
        image, within = divmod(tile, tiles_x * tiles_y)
        y, x = (n * tile_size for n in divmod(within, tiles_x))
        dx = (near + x)[None, None, :] - place[ids, 0, None, None]  # [n, 1, size]
        dy = (near + y)[None, :, None] - place[ids, 1, None, None]
        a, b, c = (conic[ids, i, None, None] for i in range(3))
        sigma = 0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy
        alpha = opacity[ids, None, None] * (-sigma).exp()
        alpha = alpha.clamp_max(MOST_ALPHA).where((sigma >= 0) & (alpha >= LEAST_ALPHA), 0)
        after = (1 - alpha).cumprod(0)
        kept = after > LEAST_LIGHT
        weight = (alpha * torch.cat((torch.ones_like(after[:1]), after[:-1]))).where(kept, 0)
        part = slice(y, y + tile_size), slice(x, x + tile_size)
        out[image][part] = torch.einsum("nyx,nd->yxd", weight, color[ids])
        light[image][part] = after.where(kept, 1).amin(0)[..., None]
    out, light = (t[:, :image_height, :image_width] for t in (out, light))
    if backgrounds is not None:
        out = out + light * backgrounds.to(acc)[:, None, None]
    return out.to(colors.dtype).contiguous(), (1 - light).to(colors.dtype).contiguous()


def _check(
    means2d: torch.Tensor, conics: torch.Tensor, colors: torch.Tensor, opacities: torch.Tensor, width: int, height: int,
    tile_size: int, offsets: torch.Tensor, backgrounds: torch.Tensor | None,
) -> tuple[int, int, int]:  # fmt: skip
    """(images, tiles in x, tiles in y)."""
    lead = opacities.shape
    fits = len(lead) == 2 and means2d.shape == (*lead, 2) and conics.shape == (*lead, 3)
    if not fits or colors.shape[:-1] != lead or colors.shape[-1] < 1:
        raise ValueError(
            "rasterize_gaussians: opacities must be [I, N], means2d [I, N, 2], conics [I, N, 3] and colors [I, N, D],"
            f" got {', '.join(str(list(t.shape)) for t in (opacities, means2d, conics, colors))}"
        )
    if min(width, height, tile_size) < 1:
        raise ValueError(
            f"rasterize_gaussians: {width} x {height} pixels in tiles of {tile_size} must be at least 1"
        )
    images, x, y = lead[0], cdiv(width, tile_size), cdiv(height, tile_size)
    if offsets.shape != (images * x * y + 1,):
        raise ValueError(
            f"rasterize_gaussians: offsets must be [{images} * {y} * {x} + 1] for {width} x {height} pixels, got"
            f" {list(offsets.shape)}"
        )
    if backgrounds is not None and backgrounds.shape != (images, colors.shape[-1]):
        raise ValueError(
            f"rasterize_gaussians: backgrounds must be [{images}, {colors.shape[-1]}], got {list(backgrounds.shape)}"
        )
    return images, x, y


@triton.jit(do_not_specialize=["width", "height", "tiles_x", "tiles"])
def _rasterize_kernel(
    means_ptr, conics_ptr, colors_ptr, opacities_ptr, offsets_ptr, ids_ptr, backgrounds_ptr, out_ptr, alphas_ptr, width,
    height, tiles_x, tiles, least_alpha, most_alpha, least_light, HAS_BACKGROUND: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One tile a program, GROUP Gaussians at a time. [GROUP, pixels]: a thread holds all Gaussians of its pixels, so
    # that products and sums over them stay within the thread.
    follow(OVERLAP)
    tile = tl.program_id(0)
    image, within = tile // tiles, tile % tiles
    pixels = tl.arange(0, TILE * TILE)
    x = (within % tiles_x) * TILE + pixels % TILE
    y = (within // tiles_x) * TILE + pixels // TILE
    inside = (x < width) & (y < height)
    px, py = x.to(tl.float32) + 0.5, y.to(tl.float32) + 0.5
    begin, end = tl.load(offsets_ptr + tile), tl.load(offsets_ptr + tile + 1)
    light = tl.where(inside, 1.0, 0.0)  # behind all Gaussians so far
    kept_light = tl.zeros([TILE * TILE], tl.float32) + 1.0  # behind those that count
    channels = tl.arange(0, BLOCK_D)
    if D <= 4:
        c0 = tl.zeros([TILE * TILE], tl.float32)
        c1 = tl.zeros([TILE * TILE], tl.float32)
        c2 = tl.zeros([TILE * TILE], tl.float32)
        c3 = tl.zeros([TILE * TILE], tl.float32)
    else:
        acc = tl.zeros([BLOCK_D, TILE * TILE], tl.float32)
    at = begin
    while (at < end) & (tl.max(light, 0) > least_light):
        slots = at + tl.arange(0, GROUP)
        there = slots < end
        g = tl.load(ids_ptr + slots, mask=there, other=0).to(tl.int64)
        mx = tl.load(means_ptr + g * 2, mask=there, other=0.0)
        my = tl.load(means_ptr + g * 2 + 1, mask=there, other=0.0)
        a = tl.load(conics_ptr + g * 3, mask=there, other=0.0)
        b = tl.load(conics_ptr + g * 3 + 1, mask=there, other=0.0)
        c = tl.load(conics_ptr + g * 3 + 2, mask=there, other=0.0)
        opacity = tl.load(opacities_ptr + g, mask=there, other=0.0)
        dx = px[None, :] - mx[:, None]
        dy = py[None, :] - my[:, None]
        sigma = 0.5 * (a[:, None] * dx * dx + c[:, None] * dy * dy) + b[:, None] * dx * dy
        alpha = opacity[:, None] * tl.exp(-sigma)
        alpha = tl.where((sigma >= 0.0) & (alpha >= least_alpha), tl.minimum(alpha, most_alpha), 0.0)
        through = 1.0 - alpha
        after = light[None, :] * tl.cumprod(through, 0)
        kept = after > least_light
        weight = tl.where(kept, after / through * alpha, 0.0)
        kept_light = tl.minimum(kept_light, tl.min(tl.where(kept, after, 1.0), 0))
        light = tl.min(after, 0)
        if D <= 4:
            color = colors_ptr + g * D
            c0 += tl.sum(weight * tl.load(color, mask=there, other=0.0)[:, None], 0)
            if D > 1:
                c1 += tl.sum(weight * tl.load(color + 1, mask=there, other=0.0)[:, None], 0)
            if D > 2:
                c2 += tl.sum(weight * tl.load(color + 2, mask=there, other=0.0)[:, None], 0)
            if D > 3:
                c3 += tl.sum(weight * tl.load(color + 3, mask=there, other=0.0)[:, None], 0)
        else:
            color_at = colors_ptr + g[None, :] * D + channels[:, None]
            color = tl.load(color_at, mask=there[None, :] & (channels < D)[:, None], other=0.0)
            acc = tl.dot(color, weight, acc, input_precision="tf32x3")
        at += GROUP
    kept_light = tl.where(inside, kept_light, 1.0)
    pixel = image.to(tl.int64) * height * width + y * width + x
    tl.store(alphas_ptr + pixel, 1.0 - kept_light, mask=inside)
    if D <= 4:
        out = out_ptr + pixel * D
        if HAS_BACKGROUND:
            background = backgrounds_ptr + image * D
            c0 += kept_light * tl.load(background)
            if D > 1:
                c1 += kept_light * tl.load(background + 1)
            if D > 2:
                c2 += kept_light * tl.load(background + 2)
            if D > 3:
                c3 += kept_light * tl.load(background + 3)
        tl.store(out, c0, mask=inside)
        if D > 1:
            tl.store(out + 1, c1, mask=inside)
        if D > 2:
            tl.store(out + 2, c2, mask=inside)
        if D > 3:
            tl.store(out + 3, c3, mask=inside)
    else:
        if HAS_BACKGROUND:
            background = tl.load(backgrounds_ptr + image * D + channels, mask=channels < D, other=0.0)
            acc += kept_light[None, :] * background[:, None]
        out = out_ptr + pixel[None, :] * D + channels[:, None]
        tl.store(out, acc, mask=inside[None, :] & (channels < D)[:, None])


def _fake(
    means2d: torch.Tensor, conics: Any, colors: torch.Tensor, opacities: Any, image_width: Any, image_height: Any,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    shape = colors.shape[0], image_height, image_width
    return colors.new_empty((*shape, colors.shape[-1])), colors.new_empty((*shape, 1))


def _supports_triton(
    means2d: torch.Tensor, conics: torch.Tensor, colors: torch.Tensor, opacities: torch.Tensor, image_width: int,
    image_height: int, tile_size: int, offsets: torch.Tensor, flatten_ids: torch.Tensor,
    backgrounds: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    given = [t for t in (means2d, conics, colors, opacities, backgrounds) if t is not None]
    wrong = {t.dtype for t in given} - {torch.float32}
    if wrong:
        return f"the kernel is for float32, not {', '.join(map(str, wrong))}"
    if tile_size not in (8, 16):
        return f"the kernel has tiles of 8 or 16 pixels, not {tile_size}"
    if colors.shape[-1] > MOST_COLORS:
        return f"the kernel has {MOST_COLORS} channels at most, not {colors.shape[-1]}"
    return None


def _triton(
    means2d: torch.Tensor, conics: torch.Tensor, colors: torch.Tensor, opacities: torch.Tensor, image_width: int,
    image_height: int, tile_size: int, offsets: torch.Tensor, flatten_ids: torch.Tensor,
    backgrounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    images, x, y = _check(
        means2d, conics, colors, opacities, image_width, image_height, tile_size, offsets, backgrounds
    )
    out, alphas = _fake(means2d, conics, colors, opacities, image_width, image_height)
    d = colors.shape[-1]
    if images:
        launch_kernel(
            _rasterize_kernel, (images * x * y,), means2d.contiguous(), conics.contiguous(), colors.contiguous(),
            opacities.contiguous(), offsets.contiguous(), flatten_ids.contiguous(),
            None if backgrounds is None else backgrounds.contiguous(), out, alphas, image_width, image_height, x, x * y,
            LEAST_ALPHA, MOST_ALPHA, LEAST_LIGHT, HAS_BACKGROUND=backgrounds is not None, D=d,
            BLOCK_D=max(next_power_of_2(d), 16), TILE=tile_size, GROUP=16, num_warps=4,
        )  # fmt: skip
    return out, alphas


rasterize_gaussians = define(
    "rasterize_gaussians(Tensor means2d, Tensor conics, Tensor colors, Tensor opacities, SymInt image_width,"
    " SymInt image_height, SymInt tile_size, Tensor offsets, Tensor flatten_ids, Tensor? backgrounds=None)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """A scene as a ring of cameras sees it. Opacities keep alphas off the limits by a chance that is small."""
    n, images, size = call["gaussians"], call["images"], call["tile_size"]
    width, height = call["image_width"], call["image_height"]
    made = scene(n, call.generator, 0)
    views, ks = cameras(images, width, height, call.generator)
    project = project_gaussians.project_gaussians
    radii, means, depths, conics, _ = project(
        made.means, made.quats, made.scales, made.opacities, views, ks, width, height
    )
    x, y = cdiv(width, size), cdiv(height, size)
    ids, offsets = intersect_tiles.intersect_tiles(means, radii, depths, size, x, y, call["intersections"])
    values = {"means2d": means, "conics": conics, "opacities": made.opacities.repeat(images, 1)}
    return {
        **values,
        "colors": call.rand(images, n, call["channels"]),
        "offsets": offsets,
        "flatten_ids": ids,
    }


def _tiles(sizes: Any) -> int:
    x, y = (cdiv(sizes[name], sizes["tile_size"]) for name in ("image_width", "image_height"))
    return sizes["images"] * x * y + 1


def _case(
    name: str, tag: str, images: int, gaussians: int, width: int, height: int, intersections: int, channels: int = 3,
    **more: Any,
) -> Case:  # fmt: skip
    weight = more.pop("weight", 1)
    dims = {
        "images": images, "gaussians": gaussians, "image_width": width, "image_height": height,
        "intersections": intersections, "channels": channels,
    }  # fmt: skip
    return Case(name, dims | more, "float32", weight, (tag,))


SPEC = OpSpec(
    name="rasterize_gaussians",
    level=1,
    reference=reference,
    op=rasterize_gaussians,
    arguments=(
        Tensor("means2d", "images gaussians 2"),
        Tensor("conics", "images gaussians 3"),
        Tensor("colors", "images gaussians channels"),
        Tensor("opacities", "images gaussians"),
        Scalar("image_width"),
        Scalar("image_height"),
        Scalar("tile_size", default=16),
        Tensor("offsets", "tiles", "int32"),
        Tensor("flatten_ids", "intersections", "int32"),
        Tensor("backgrounds", "images channels", when="background"),
    ),
    outputs=(
        Tensor("colors_out", "images image_height image_width channels"),
        Tensor("alphas", "images image_height image_width 1"),
    ),
    axes={
        "images": Axis.per_call(), "gaussians": Axis.count(), "image_width": Axis.per_call(),
        "image_height": Axis.per_call(), "intersections": Axis.per_call(), "channels": Axis.option(3),
        "background": Axis.option(False),
        "tiles": Axis(_tiles),
    },
    values=_values,
    flops="2 * intersections * tile_size * tile_size",  # of about 30: pixels end early
    cases=(
        _case("million_1080p", "model", 1, 1_000_000, 1920, 1080, 10_000_000, weight=8),
        _case("million_4_views", "model", 4, 1_000_000, 1920, 1080, 40_000_000, weight=4),
        _case("million_depth", "model", 1, 1_000_000, 1920, 1080, 10_000_000, 4),
        _case("one", "odd", 1, 1, 1, 1, 4, 1),
        _case("odd_63", "odd", 1, 63, 33, 17, 400),
        _case("background", "odd", 2, 100, 40, 31, 2_000, 3, background=True),
        _case("depth", "odd", 1, 129, 48, 16, 1_000, 4),
        _case("two_channels", "odd", 1, 65, 20, 35, 500, 2, background=True),
        _case("features", "odd", 1, 70, 30, 20, 500, 7, background=True),
        _case("wide", "odd", 1, 40, 16, 16, 300, 32),
        _case("small_tiles", "odd", 1, 80, 23, 30, 900, 3, tile_size=8),
        _case("none", "odd", 1, 0, 16, 20, 0),
    ),
    tolerance={"float32": Tolerance(1e-4, 1e-4)},
    tie_sensitive=True,
    permutable=lambda *args: Permutable(),
    activations=("colors",),
    baseline="reference",
)  # fmt: skip
