"""The decoder of latent videos: diffusers' AutoencoderKLHunyuanVideo15, without its encoder, under its names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.configs import pipeline_folder
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.overrides.conv.diffusers_video import (
    CausalConv3d,
    ChannelNorm,
    DiffusersHunyuanVideo15ResnetBlock,
    normed,
)
from fastkernels.overrides.dense_attention.attention_dense import attend

FIELDS = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 32, "block_out_channels": (128, 256, 512, 1024, 1024),
    "layers_per_block": 2, "spatial_compression_ratio": 16, "temporal_compression_ratio": 4, "scaling_factor": 1.03682,
}  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {"downsample_match_channel": (True,), "upsample_match_channel": (True,)}
TILE, OVERLAP = 256, 0.25  # pixels of a tile's side, and the share of it that is blended with the next one


def spread(x: torch.Tensor, times: int) -> torch.Tensor:
    """Channels to pixels: [B, times * 4 * C, F, H, W] to [B, C, times * F, 2 H, 2 W]."""
    cut = x.unflatten(1, (times, 2, 2, -1))  # [B, t, 2, 2, C, F, H, W]
    return cut.permute(0, 4, 5, 1, 6, 2, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class Upsample(nn.Module):
    """Twice the size, and with `temporal` twice the frames but for the first one; a shortcut repeats channels."""

    def __init__(self, channels: int, out: int, temporal: bool) -> None:
        super().__init__()
        self.times = 2 if temporal else 1
        self.conv = CausalConv3d(channels, 4 * self.times * out)
        self.repeats = 4 * self.times * out // channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x)
        if self.times == 1:
            return spread(h, 1) + spread(x.repeat_interleave(self.repeats, dim=1), 1)
        first = spread(h[:, :, :1], 1)
        first = first[:, : first.shape[1] // 2] + spread(x[:, :, :1], 1).repeat_interleave(
            self.repeats // 2, dim=1
        )
        rest = spread(h[:, :, 1:], 2) + spread(x[:, :, 1:], 2).repeat_interleave(self.repeats, dim=1)
        return torch.cat((first, rest), dim=2)


class FrameAttention(nn.Module):
    """x [B, C, F, H, W] plus attention of each frame to those up to it, frame after frame: without a mask of pairs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.to_q, self.to_k, self.to_v, self.proj_out = (nn.Conv3d(channels, channels, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = normed(self.norm, x, False, False)
        # [B, F H W, 1, C]
        q, k, v = (c(y).flatten(2).transpose(1, 2)[:, :, None] for c in (self.to_q, self.to_k, self.to_v))
        size, scale = x.shape[3] * x.shape[4], x.shape[1] ** -0.5
        ends = [(i + 1) * size for i in range(x.shape[2])]
        found = torch.cat([attend(q[:, n - size : n], k[:, :n], v[:, :n], scale) for n in ends], dim=1)
        return self.proj_out(found.unflatten(1, x.shape[2:]).permute(0, 4, 1, 2, 3)) + x


class Middle(nn.Module):
    """Two residual blocks with attention between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([FrameAttention(channels)])
        self.resnets = nn.ModuleList(DiffusersHunyuanVideo15ResnetBlock(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Level(nn.Module):
    """Residual blocks of one size, and the upsampling behind them, if any."""

    def __init__(self, channels: int, out: int, layers: int, upsampler: Upsample | None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            DiffusersHunyuanVideo15ResnetBlock(channels if i == 0 else out, out) for i in range(layers)
        )
        self.upsamplers = nn.ModuleList([] if upsampler is None else [upsampler])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (*self.resnets, *self.upsamplers):
            x = part(x)
        return x


class Decoder(nn.Module):
    """Latents [B, C, f, h, w] to pixels [B, 3, F, H, W] in about -1 to 1."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        widths = list(reversed(c.block_out_channels))
        self.repeat = widths[0] // c.latent_channels
        self.conv_in = CausalConv3d(c.latent_channels, widths[0])
        self.mid_block = Middle(widths[0])
        spatial = int(math.log2(c.spatial_compression_ratio))
        temporal = int(math.log2(c.temporal_compression_ratio))
        levels, size = [], widths[0]
        for i, width in enumerate(widths):
            up = Upsample(width, widths[i + 1], i < temporal) if i < spatial else None
            levels.append(Level(size, width, c.layers_per_block + 1, up))
            size = width if up is None else widths[i + 1]
        self.up_blocks = nn.ModuleList(levels)
        self.norm_out = ChannelNorm(widths[-1])
        self.conv_out = CausalConv3d(widths[-1], c.out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mid_block(self.conv_in(x) + x.repeat_interleave(self.repeat, dim=1))
        for level in self.up_blocks:
            x = level(x)
        return self.conv_out.conv(normed(self.norm_out, x))


class VideoDecoder(nn.Module):
    """config: of a pipeline. Frames larger than a tile are decoded in tiles, as diffusers does with tiling enabled.

    scale   pixels of a latent, in both directions
    period  frames of a latent, but for the first one
    tile    pixels of a tile's side. Raises Unsupported
    """

    ops = ("attention_dense", "norm_pad")

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = pipeline_folder.fields(config, "vae", ("AutoencoderKLHunyuanVideo15",), FIELDS, FIXED)
        self.scale, self.period = c.spatial_compression_ratio, c.temporal_compression_ratio
        levels, widths = len(c.block_out_channels), c.block_out_channels
        for name, ratio in (("spatial", self.scale), ("temporal", self.period)):
            if ratio & (ratio - 1) or ratio > min(2 ** (levels - 1), self.scale):
                raise Unsupported(
                    f"vae: {name}_compression_ratio={ratio!r} is not supported with {levels} levels: only powers of"
                    " two, as many as there are levels to go up"
                )
        if widths[-1] % c.latent_channels:
            raise Unsupported(
                f"vae: latent_channels={c.latent_channels} does not divide block_out_channels={widths!r}"
            )
        self.channels: int = c.latent_channels
        self.factor = c.scaling_factor
        self.tile = TILE
        self.decoder = Decoder(c)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, f, h, w] of the denoiser to pixels [B, F, 3, H, W] in 0 to 255, uint8."""
        like = self.decoder.conv_in.conv.weight
        x = (latents / self.factor).to(like.dtype)
        pixels = self.decode(x.contiguous(memory_format=torch.channels_last_3d) if like.is_cuda else x)
        return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).transpose(1, 2)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, f, h, w] to pixels [B, 3, F, H, W] in about -1 to 1."""
        side = self.tile // self.scale
        if max(latents.shape[3:]) <= side:
            return self.decoder(latents)
        step, blend = int(side * (1 - OVERLAP)), int(self.tile * OVERLAP)
        kept = self.tile - blend
        rows: list[torch.Tensor] = []
        above: list[torch.Tensor] = []
        for top in range(0, latents.shape[3], step):
            made: list[torch.Tensor] = []
            for left in range(0, latents.shape[4], step):
                tile = self.decoder(latents[:, :, :, top : top + side, left : left + side])
                if above:
                    tile = blended(above[len(made)], tile, blend, 3)
                if made:
                    tile = blended(made[-1], tile, blend, 4)
                made.append(tile)
            rows.append(torch.cat([tile[:, :, :, :kept, :kept] for tile in made], dim=4))
            above = made
        return torch.cat(rows, dim=3)


def blended(before: torch.Tensor, tile: torch.Tensor, most: int, dim: int) -> torch.Tensor:
    """The tile, whose beginning along a dimension fades in from the end of the tile before it."""
    n = min(before.shape[dim], tile.shape[dim], most)
    shape: Sequence[int] = [n if i == dim else 1 for i in range(tile.dim())]
    share = (torch.arange(n, device=tile.device, dtype=torch.float32) / max(n, 1)).to(tile.dtype).view(shape)
    end, start = before.narrow(dim, before.shape[dim] - n, n), tile.narrow(dim, 0, n)
    mixed = end * (1 - share) + start * share
    return torch.cat((mixed, tile.narrow(dim, n, tile.shape[dim] - n)), dim=dim)
