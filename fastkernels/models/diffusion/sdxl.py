"""Stable Diffusion XL (Podell et al., arXiv 2307.01952): images from text by a UNet, from diffusers' folders.

The UNet is built of the drop-in blocks of UNets in diffusers. The interface is that of common/pipelines/pipeline.py.
Latents are [C, h, w].
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.configs import pipeline_folder
from fastkernels.models.common.configs.config import PlainConfig
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.pipelines import schedules, texts
from fastkernels.models.common.pipelines.autoencoder import Autoencoder
from fastkernels.models.common.pipelines.pipeline import Conditions, Guidance, Pipeline, Size
from fastkernels.models.common.pipelines.time_embedding import TimeMlp
from fastkernels.overrides.conv.diffusers import DiffusersUpsample2D
from fastkernels.overrides.diffusion.diffusers import DiffusersResnetBlock2D
from fastkernels.overrides.diffusion.diffusers_unet import DiffusersBasicTransformerBlock
from fastkernels.overrides.diffusion.group_norm import group_norm
from fastkernels.overrides.diffusion.timestep_embedding import timestep_embedding

FIELDS = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "flip_sin_to_cos": True, "freq_shift": 0,
    "down_block_types": (), "up_block_types": (), "block_out_channels": (320, 640, 1280), "layers_per_block": 2,
    "norm_num_groups": 32, "norm_eps": 1e-5, "cross_attention_dim": 2048, "transformer_layers_per_block": 1,
    "attention_head_dim": 8, "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": None,
}  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {
    "addition_embed_type": ("text_time",), "use_linear_projection": (True,), "act_fn": ("silu",),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",), "center_input_sample": (False,), "dropout": (0.0, 0),
    "only_cross_attention": (False,), "downsample_padding": (1,), "mid_block_scale_factor": (1, 1.0),
    "dual_cross_attention": (False,), "upcast_attention": (False, None), "resnet_time_scale_shift": ("default",),
    "resnet_skip_time_act": (False,), "resnet_out_scale_factor": (1.0, 1), "time_embedding_type": ("positional",),
    "conv_in_kernel": (3,), "conv_out_kernel": (3,), "attention_type": ("default",),
    "class_embeddings_concat": (False,), "addition_embed_type_num_heads": (64,),
}  # fmt: skip
DOWN = {"DownBlock2D": False, "CrossAttnDownBlock2D": True}  # whether the block has attention
UP = {"UpBlock2D": False, "CrossAttnUpBlock2D": True}
SIZES = 6  # numbers of an image's size and crop that the model takes


def published() -> PlainConfig:
    """The config of SDXL 1.0, with one transformer block a level and without text encoders."""
    down, up = (("DownBlock2D", *["CrossAttnDownBlock2D"] * 2), (*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"))
    vae = {
        "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "up_block_types": ["UpDecoderBlock2D"] * 4,
        "scaling_factor": 0.13025,
    }  # fmt: skip
    unet = {
        "down_block_types": down, "up_block_types": up, "attention_head_dim": [5, 10, 20],
        "projection_class_embeddings_input_dim": 2816,
    }  # fmt: skip
    return PlainConfig(
        architectures=["StableDiffusionXLPipeline"], model_type="sdxl", dtype=torch.float16, options={},
        classes={"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": "EulerDiscreteScheduler"},
        parts={"unet": unet, "vae": vae},
    )  # fmt: skip


def _normed(norm: nn.GroupNorm, x: torch.Tensor, silu: bool) -> torch.Tensor:
    return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, silu)


class Transformer(nn.Module):
    """Transformer blocks over all pixels, added to x [B, C, H, W]; text [B, T, D]."""

    def __init__(self, c: Any, channels: int, heads: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(c.norm_num_groups, channels, eps=1e-6)
        self.proj_in, self.proj_out = (nn.Linear(channels, channels) for _ in range(2))
        self.transformer_blocks = nn.ModuleList(
            DiffusersBasicTransformerBlock(
                channels, heads, channels // heads, cross_attention_dim=c.cross_attention_dim
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        tokens = _normed(self.norm, x, False).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        tokens = self.proj_in(tokens)
        for block in self.transformer_blocks:
            tokens = block(tokens, encoder_hidden_states=text)
        found = self.proj_out(tokens).view(batch, height, width, channels).permute(0, 3, 1, 2)
        return found + x


class Downsample(nn.Module):
    """A convolution to half the size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Level(nn.Module):
    """Residual blocks of one size, each followed by a transformer if the level has attention.

    channels: the inputs of each residual block. mid: the first block comes before all transformers.
    """

    def __init__(
        self, c: Any, channels: Sequence[int], out: int, heads: int, depth: int, attention: bool, mid: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.resnets = nn.ModuleList(
            DiffusersResnetBlock2D(
                in_channels=n, out_channels=out, temb_channels=4 * c.block_out_channels[0],
                groups=c.norm_num_groups, eps=c.norm_eps,
            )
            for n in channels
        )  # fmt: skip
        count = (len(channels) - mid) if attention else 0
        self.attentions = nn.ModuleList(Transformer(c, out, heads, depth) for _ in range(count))

    def block(self, i: int, x: torch.Tensor, embedding: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Residual block i and its transformer."""
        x = self.resnets[i](x, embedding)
        return self.attentions[i](x, text) if self.attentions else x


class Down(Level):
    """A level on the way down. Returns its last output and all outputs."""

    def __init__(self, *args: Any, samples: bool) -> None:
        super().__init__(*args)
        self.downsamplers = nn.ModuleList([Downsample(args[2])] if samples else [])

    def forward(
        self, x: torch.Tensor, embedding: torch.Tensor, text: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found = []
        for i in range(len(self.resnets)):
            x = self.block(i, x, embedding, text)
            found.append(x)
        for downsampler in self.downsamplers:
            x = downsampler(x)
            found.append(x)
        return x, found


class Mid(Level):
    """The smallest level."""

    def forward(self, x: torch.Tensor, embedding: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.resnets[0](x, embedding)
        for attention, resnet in zip(self.attentions, self.resnets[1:], strict=True):
            x = resnet(attention(x, text), embedding)
        return x


class Up(Level):
    """A level on the way up, which takes the outputs of the way down, last ones first, off the end of `skips`."""

    def __init__(self, *args: Any, samples: bool) -> None:
        super().__init__(*args)
        ups = [DiffusersUpsample2D(args[2], use_conv=True, out_channels=args[2])] if samples else []
        self.upsamplers = nn.ModuleList(ups)

    def forward(
        self, x: torch.Tensor, skips: list[torch.Tensor], embedding: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        for i in range(len(self.resnets)):
            x = self.block(i, torch.cat((x, skips.pop()), dim=1), embedding, text)
        for upsampler in self.upsamplers:
            x = upsampler(x, skips[-1].shape[2:])
        return x


class UNet(nn.Module):
    """The denoiser: x [B, C, h, w], times [B], text [B, T, D], pooled [B, P], sizes [B, 6] to the noise in x."""

    ops = (
        "attention_dense",
        "gated_residual",
        "geglu",
        "group_norm",
        "layer_norm",
        "timestep_embedding",
        "upsample_conv",
    )

    def __init__(self, c: Any) -> None:
        super().__init__()
        widths = c.block_out_channels
        n, embedding = len(widths), 4 * widths[0]
        heads, depths = _each(c.attention_head_dim, n), _each(c.transformer_layers_per_block, n)
        self.times = widths[0], c.flip_sin_to_cos, float(c.freq_shift)
        self.sizes = c.addition_time_embed_dim, c.flip_sin_to_cos, float(c.freq_shift)
        self.conv_in = nn.Conv2d(c.in_channels, widths[0], 3, padding=1)
        self.time_embedding = TimeMlp(widths[0], embedding)
        self.add_embedding = TimeMlp(c.projection_class_embeddings_input_dim, embedding)
        before, layers = [widths[0], *widths], c.layers_per_block
        self.down_blocks = nn.ModuleList(
            Down(
                c, [before[i], *[width] * (layers - 1)], width, heads[i], depths[i], DOWN[c.down_block_types[i]],
                samples=i + 1 < n,
            )
            for i, width in enumerate(widths)
        )  # fmt: skip
        last = widths[-1]
        self.mid_block = Mid(c, [last, last], last, heads[-1], depths[-1], True, True)
        up, below = widths[::-1], [last, *widths[::-1]]
        self.up_blocks = nn.ModuleList(
            Up(
                c,
                # what comes from below, and the output of the way down that is put next to it
                [
                    (width if j else below[i]) + (width if j < layers else up[min(i + 1, n - 1)])
                    for j in range(layers + 1)
                ],
                width, heads[-1 - i], depths[-1 - i], UP[c.up_block_types[i]], samples=i + 1 < n,
            )
            for i, width in enumerate(up)
        )  # fmt: skip
        self.conv_norm_out = nn.GroupNorm(c.norm_num_groups, widths[0], eps=c.norm_eps)
        self.conv_out = nn.Conv2d(widths[0], c.out_channels, 3, padding=1)

    def forward(
        self, x: torch.Tensor, times: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, sizes: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        of_sizes = timestep_embedding(sizes.flatten(), *self.sizes).view(len(x), -1).to(x.dtype)
        embedding = self.time_embedding(timestep_embedding(times, *self.times).to(x.dtype))
        embedding = embedding + self.add_embedding(torch.cat((pooled, of_sizes), dim=1))
        x = self.conv_in(x)
        skips = [x]
        for down in self.down_blocks:
            x, found = down(x, embedding, text)
            skips += found
        x = self.mid_block(x, embedding, text)
        for up in self.up_blocks:
            x = up(x, skips, embedding, text)
        return self.conv_out(_normed(self.conv_norm_out, x, True))


def _each(value: Any, n: int) -> tuple[Any, ...]:
    """A field that config.json gives once for all levels, or for each."""
    found = value if isinstance(value, tuple) else (value,) * n
    if len(found) != n or not all(type(v) is int for v in found):
        raise Unsupported(f"unet: {value!r} is neither an integer nor {n} integers, one a level")
    return found


def _fields(config: Any) -> Any:
    c = pipeline_folder.fields(config, "unet", ("UNet2DConditionModel",), FIELDS, FIXED)
    n = len(c.block_out_channels)
    for name, known in (("down_block_types", DOWN), ("up_block_types", UP)):
        found = getattr(c, name)
        if len(found) != n or not set(found) <= set(known):
            raise Unsupported(f"unet: {name}={found!r} is not supported, only {n} of {', '.join(known)}")
    for name in (
        "sample_size",
        "layers_per_block",
        "cross_attention_dim",
        "projection_class_embeddings_input_dim",
    ):
        if type(getattr(c, name)) is not int:
            raise Unsupported(f"unet: {name}={getattr(c, name)!r} is not supported, only an integer")
    return c


class StableDiffusionXLPipeline(Pipeline):
    """config: of a folder of diffusers, of a model without refiner. Raises Unsupported."""

    guidance, steps, scale, edits = Guidance.DOUBLED, 50, 5.0, True

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = _fields(config)
        self.config = config
        self.unet, self.vae = UNet(c), Autoencoder(config)
        self.multiple = self.vae.scale
        self.size = (c.sample_size * self.vae.scale,) * 2
        kinds = [DOWN[name] for name in c.down_block_types]
        self.level = kinds.index(True) if True in kinds else len(kinds) - 1  # the largest with attention
        self.schedule(self.steps, self.size)  # raises for a scheduler that is not supported

    def load_texts(
        self, folder: Path, config: Any, device: torch.device, dtype: torch.dtype, seed: int | None
    ) -> None:
        self.texts = tuple(
            texts.load(folder, config, suffix, device, dtype, None, seed) for suffix in self.encoders
        )

    def encode(self, prompts: Sequence[str | None]) -> list[Conditions]:
        given = [prompt or "" for prompt in prompts]
        first, second = (encoder(given, hidden_states=True) for encoder in self.texts)
        text = torch.cat([found.hidden_states[-2] for found in (first, second)], dim=-1)
        zeros = self.config.options.get("force_zeros_for_empty_prompt", True)
        return [
            {"text": t * 0 if none else t, "pooled": p * 0 if none else p}
            for t, p, none in zip(
                text, second.text_embeds, [zeros and p is None for p in prompts], strict=True
            )
        ]

    def tokens(self, size: Size) -> int:
        height, width = (-(-n // (self.vae.scale << self.level)) for n in size)
        return height * width

    def schedule(self, steps: int, size: Size, first: int = 0) -> schedules.Schedule:
        return schedules.of_noise(self.config, steps, first)

    def begin(self, noise: torch.Tensor) -> torch.Tensor:
        return noise

    def forward(
        self, latents: torch.Tensor, times: torch.Tensor, scales: torch.Tensor, conditions: Conditions, size: Size
    ) -> torch.Tensor:  # fmt: skip
        text, pooled = conditions["text"], conditions["pooled"]
        x = latents.to(text.dtype)
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        sizes = text.new_zeros(len(x), SIZES)  # height and width, the corner of the crop, and the same again
        for at, value in zip((0, 1, 4, 5), (*size, *size), strict=True):
            sizes[:, at] = value
        return self.unet(x, times, text, pooled, sizes)

    def decode(self, latents: torch.Tensor, size: Size) -> torch.Tensor:
        return self.vae(latents)


ARCH = Architecture(
    names=("StableDiffusionXLPipeline",),
    category="diffusion",
    model="StableDiffusionXLPipeline",
    runner="Denoise",
    model_type="sdxl",
    inputs="prompts",
    folders=("unet", "vae"),
    packed={},
)
