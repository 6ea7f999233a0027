"""Latent images: diffusers' AutoencoderKL, under its parameter names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.models.common.configs import pipeline_folder
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.overrides.conv.diffusers import DiffusersUpsample2D
from fastkernels.overrides.dense_attention.attention_dense import attend
from fastkernels.overrides.diffusion.diffusers import DiffusersResnetBlock2D
from fastkernels.overrides.diffusion.group_norm import group_norm
from fastkernels.overrides.linear.modules import products

EPS, UP, DOWN = 1e-6, "UpDecoderBlock2D", "DownEncoderBlock2D"
LIMITS = -30.0, 20.0  # of the logarithm of a latent's variance
FIELDS = {
    "in_channels": 3, "out_channels": 3, "block_out_channels": (64,), "layers_per_block": 1, "latent_channels": 4,
    "norm_num_groups": 32, "sample_size": 32, "scaling_factor": 0.18215, "shift_factor": None, "force_upcast": True,
    "use_quant_conv": True, "use_post_quant_conv": True, "mid_block_add_attention": True, "down_block_types": (),
    "up_block_types": (UP,),
}  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {"act_fn": ("silu",), "latents_mean": (None,), "latents_std": (None,)}


class Attention(nn.Module):
    """Attention of all pixels to all, with one head, added to its input [B, C, H, W]."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.group_norm
        y = group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps).flatten(2).transpose(1, 2)
        q, k, v = (t[:, :, None] for t in products((self.to_q, self.to_k, self.to_v), y))
        found = self.to_out[0](attend(q, k, v, x.shape[1] ** -0.5))
        return x + found.transpose(1, 2).reshape(x.shape)


def _resnet(channels: int, out: int, groups: int) -> DiffusersResnetBlock2D:
    no_time: Any = None
    return DiffusersResnetBlock2D(
        in_channels=channels, out_channels=out, temb_channels=no_time, groups=groups, eps=EPS
    )


class Middle(nn.Module):
    """Two residual blocks with attention between them."""

    def __init__(self, channels: int, groups: int, attention: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([Attention(channels, groups)] if attention else [])
        self.resnets = nn.ModuleList(_resnet(channels, channels, groups) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.resnets[0](x, None)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x, None)


class Level(nn.Module):
    """Residual blocks of one size, and the upsampling behind them."""

    def __init__(self, channels: int, out: int, layers: int, groups: int, upsamples: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_resnet(channels if i == 0 else out, out, groups) for i in range(layers))
        ups = [DiffusersUpsample2D(out, use_conv=True, out_channels=out)] if upsamples else []
        self.upsamplers = nn.ModuleList(ups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for resnet in self.resnets:
            x = resnet(x, None)
        for upsampler in self.upsamplers:
            x = upsampler(x)
        return x


class Decoder(nn.Module):
    """Latents [B, C, h, w] to pixels [B, 3, H, W] in about -1 to 1."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        widths, groups = list(reversed(c.block_out_channels)), c.norm_num_groups
        self.conv_in = nn.Conv2d(c.latent_channels, widths[0], 3, padding=1)
        self.mid_block = Middle(widths[0], groups, c.mid_block_add_attention)
        before = [widths[0], *widths]
        self.up_blocks = nn.ModuleList(
            Level(before[i], width, c.layers_per_block + 1, groups, i + 1 < len(widths))
            for i, width in enumerate(widths)
        )
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=EPS)
        self.conv_out = nn.Conv2d(widths[-1], c.out_channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mid_block(self.conv_in(x))
        for level in self.up_blocks:
            x = level(x)
        norm = self.conv_norm_out
        return self.conv_out(group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, True))


class Downsample(nn.Module):
    """A convolution to half the size, which pads at the right and at the bottom."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.pad(x, (0, 1, 0, 1)))


class Shrink(nn.Module):
    """Residual blocks of one size, and the downsampling behind them."""

    def __init__(self, channels: int, out: int, layers: int, groups: int, samples: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_resnet(channels if i == 0 else out, out, groups) for i in range(layers))
        self.downsamplers = nn.ModuleList([Downsample(out)] if samples else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for resnet in self.resnets:
            x = resnet(x, None)
        for downsampler in self.downsamplers:
            x = downsampler(x)
        return x


class Encoder(nn.Module):
    """Pixels [B, 3, H, W] in -1 to 1 to means and logarithms of variances [B, 2 C, h, w]."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        widths, groups = c.block_out_channels, c.norm_num_groups
        self.conv_in = nn.Conv2d(c.in_channels, widths[0], 3, padding=1)
        before = [widths[0], *widths]
        self.down_blocks = nn.ModuleList(
            Shrink(before[i], width, c.layers_per_block, groups, i + 1 < len(widths))
            for i, width in enumerate(widths)
        )
        self.mid_block = Middle(widths[-1], groups, c.mid_block_add_attention)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=EPS)
        self.conv_out = nn.Conv2d(widths[-1], 2 * c.latent_channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = level(x)
        norm, x = self.conv_norm_out, self.mid_block(x)
        return self.conv_out(group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, True))


class Autoencoder(nn.Module):
    """config: of a pipeline. In float16, `force_upcast` computes in float32: activations overflow. Raises Unsupported.

    scale  pixels of a latent, in both directions
    """

    ops = ("attention_dense", "group_norm", "upsample_conv")

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = pipeline_folder.fields(config, "vae", ("AutoencoderKL",), FIELDS, FIXED)
        if c.up_block_types != (UP,) * len(c.block_out_channels):
            raise Unsupported(
                f"vae: up_block_types={c.up_block_types!r} is not supported, only {UP} for each level"
            )
        if c.down_block_types not in ((), (DOWN,) * len(c.block_out_channels)):
            raise Unsupported(
                f"vae: down_block_types={c.down_block_types!r} is not supported, only {DOWN} for each level"
            )
        self.scale = 2 ** (len(c.block_out_channels) - 1)
        self.channels: int = c.latent_channels
        self.factor, self.shift = c.scaling_factor, c.shift_factor or 0.0
        self.post_quant_conv = nn.Conv2d(self.channels, self.channels, 1) if c.use_post_quant_conv else None
        self.decoder = Decoder(c)
        self.encoder = Encoder(c)
        self.quant_conv = nn.Conv2d(2 * self.channels, 2 * self.channels, 1) if c.use_quant_conv else None
        if torch.get_default_dtype() == torch.float16 and c.force_upcast:
            self.float()

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, h, w] of the denoiser to pixels [B, 3, H, W] in 0 to 255, uint8."""
        like = self.decoder.conv_in.weight
        x = (latents / self.factor + self.shift).to(like.dtype)
        if like.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        pixels = self.decoder(x if self.post_quant_conv is None else self.post_quant_conv(x))
        return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)

    def encode(self, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Pixels [B, 3, H, W] in 0 to 255, uint8, to latents of the denoiser [B, C, h, w] in float32.

        generator: of the CPU, for the deviation from the means
        """
        like = self.encoder.conv_in.weight
        x = (pixels.float() / 255 * 2 - 1).to(like.dtype)
        if like.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        found = self.encoder(x)
        mean, variance = (found if self.quant_conv is None else self.quant_conv(found)).chunk(2, dim=1)
        drawn = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        latents = mean + torch.exp(0.5 * variance.clamp(*LIMITS)) * drawn
        return (latents.float() - self.shift) * self.factor
