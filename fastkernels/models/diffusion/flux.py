"""FLUX.1 (Black Forest Labs, 2024): images from text by flow matching, from diffusers' folders.

The transformer is built of the drop-in blocks of FLUX in diffusers. The interface is that of
common/pipelines/pipeline.py. Latents are tokens [S, 4 * C], each of 2 x 2 latent pixels.
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
from fastkernels.overrides.diffusion.diffusers import DiffusersAdaLayerNormContinuous
from fastkernels.overrides.diffusion.diffusers_flux import (
    DiffusersFluxSingleTransformerBlock,
    DiffusersFluxTransformerBlock,
)
from fastkernels.overrides.diffusion.rope_axes import rope_axes
from fastkernels.overrides.diffusion.timestep_embedding import timestep_embedding

THETA, TIME_CHANNELS = 10000, 256
FIELDS = {
    "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
DEV_STEPS, SCHNELL_STEPS = 28, 4
DEV_TEXT, SCHNELL_TEXT = 512, 256  # tokens of T5


def published() -> PlainConfig:
    """The config of FLUX.1-dev, with one block of each kind and without text encoders."""
    vae = {
        "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "use_quant_conv": False, "use_post_quant_conv": False,
    }  # fmt: skip
    return PlainConfig(
        architectures=["FluxPipeline"], model_type="flux", dtype=torch.bfloat16, options={},
        classes={
            "transformer": "FluxTransformer2DModel", "vae": "AutoencoderKL",
            "scheduler": "FlowMatchEulerDiscreteScheduler",
        },
        parts={"transformer": {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}, "vae": vae},
    )  # fmt: skip


class TimeTextEmbedding(nn.Module):
    """The embedding [B, H] of time, guidance and the prompt's vector, which modulates every block."""

    def __init__(self, size: int, pooled: int, guided: bool) -> None:
        super().__init__()
        self.timestep_embedder = TimeMlp(TIME_CHANNELS, size)
        if guided:
            self.guidance_embedder = TimeMlp(TIME_CHANNELS, size)
        self.text_embedder = TimeMlp(pooled, size)
        self.guided = guided

    def forward(self, times: torch.Tensor, scales: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        found = self.timestep_embedder(_waves(times, pooled))
        if self.guided:
            found = found + self.guidance_embedder(_waves(scales, pooled))
        return found + self.text_embedder(pooled)


def _waves(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return timestep_embedding(values.to(like.dtype), TIME_CHANNELS, True, 0.0).to(like.dtype)


class FluxTransformer(nn.Module):
    """The denoiser: image tokens [B, S, C], text [B, St, D], pooled [B, P] to the velocity of the image tokens."""

    ops = (
        "ada_layer_norm",
        "attention_dense",
        "gated_residual",
        "gelu",
        "linear_gelu",
        "qk_norm_rope",
        "rope_axes",
        "timestep_embedding",
    )

    def __init__(self, c: Any) -> None:
        super().__init__()
        heads, head = c.num_attention_heads, c.attention_head_dim
        size = heads * head
        axes = c.axes_dims_rope
        if sum(axes) != head:
            raise Unsupported(
                f"transformer: axes_dims_rope={axes!r} does not sum to attention_head_dim={head}"
            )
        if len(axes) != 3 or any(n % 2 for n in axes):
            raise Unsupported(
                f"transformer: axes_dims_rope={axes!r} is not supported, only three even numbers"
            )
        self.axes = list(c.axes_dims_rope)
        self.time_text_embed = TimeTextEmbedding(size, c.pooled_projection_dim, c.guidance_embeds)
        self.context_embedder = nn.Linear(c.joint_attention_dim, size)
        self.x_embedder = nn.Linear(c.in_channels, size)
        self.transformer_blocks = nn.ModuleList(
            DiffusersFluxTransformerBlock(size, heads, head) for _ in range(c.num_layers)
        )
        self.single_transformer_blocks = nn.ModuleList(
            DiffusersFluxSingleTransformerBlock(size, heads, head) for _ in range(c.num_single_layers)
        )
        self.norm_out = DiffusersAdaLayerNormContinuous(size, size, elementwise_affine=False, eps=1e-6)
        self.proj_out = nn.Linear(size, c.in_channels)

    def forward(
        self, latents: torch.Tensor, times: torch.Tensor, scales: torch.Tensor, text: torch.Tensor,
        pooled: torch.Tensor, grid: Size,
    ) -> torch.Tensor:  # fmt: skip
        embedding = self.time_text_embed(times, scales, pooled)
        image, text = self.x_embedder(latents), self.context_embedder(text)
        rotary = self._rotary(text.shape[1], grid, latents.device)
        for block in self.transformer_blocks:
            text, image = block(image, text, embedding, rotary)
        for block in self.single_transformer_blocks:
            text, image = block(image, text, embedding, rotary)
        return self.proj_out(self.norm_out(image, embedding))

    def _rotary(self, texts: int, grid: Size, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of text tokens, at position 0, and of image tokens, at (0, row, column)."""
        rows, columns = (torch.arange(n, device=device, dtype=torch.float32) for n in grid)
        places = torch.cartesian_prod(torch.zeros(1, device=device), rows, columns)
        return rope_axes(torch.cat((places.new_zeros(texts, 3), places)), self.axes, THETA)


class FluxPipeline(Pipeline):
    """config: of a folder of diffusers. Without guidance_embeds (schnell) there is no guidance. Raises Unsupported."""

    edits = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = pipeline_folder.fields(
            config, "transformer", ("FluxTransformer2DModel",), FIELDS,
            {"patch_size": (1,), "out_channels": (None, config.parts["transformer"].get("in_channels", 64))},
        )  # fmt: skip
        self.config = config
        self.transformer = FluxTransformer(c)
        self.vae = Autoencoder(config)
        if c.in_channels != 4 * self.vae.channels:
            raise Unsupported(
                f"transformer: in_channels={c.in_channels} is not four times latent_channels={self.vae.channels} of"
                " the vae"
            )
        self.guidance = Guidance.EMBEDDED if c.guidance_embeds else Guidance.NONE
        self.steps, self.scale = (DEV_STEPS, 3.5) if c.guidance_embeds else (SCHNELL_STEPS, 0.0)
        self.text_length = DEV_TEXT if c.guidance_embeds else SCHNELL_TEXT
        self.multiple = 2 * self.vae.scale
        self.size = (128 * self.vae.scale,) * 2
        self.schedule(self.steps, self.size)  # raises for a scheduler that is not supported

    def load_texts(
        self, folder: Path, config: Any, device: torch.device, dtype: torch.dtype, seed: int | None
    ) -> None:
        lengths = (None, self.text_length)
        self.texts = tuple(
            texts.load(folder, config, suffix, device, dtype, length, seed)
            for suffix, length in zip(self.encoders, lengths, strict=True)
        )

    def encode(self, prompts: Sequence[str | None]) -> list[Conditions]:
        given = [prompt or "" for prompt in prompts]
        pooled, text = self.texts[0](given).pooler_output, self.texts[1](given).last_hidden_state
        return [{"text": t, "pooled": p} for t, p in zip(text, pooled, strict=True)]

    def _grid(self, size: Size) -> Size:
        return size[0] // self.multiple, size[1] // self.multiple

    def tokens(self, size: Size) -> int:
        rows, columns = self._grid(size)
        return rows * columns + self.text_length

    def schedule(self, steps: int, size: Size, first: int = 0) -> schedules.Schedule:
        return schedules.flow_matching(self.config, steps, self.tokens(size) - self.text_length)

    def first_step(self, steps: int, strength: float) -> int:
        return int(steps - steps * strength)

    def begin(self, noise: torch.Tensor) -> torch.Tensor:
        cut = noise.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [1, C, h / 2, 2, w / 2, 2]
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def forward(
        self, latents: torch.Tensor, times: torch.Tensor, scales: torch.Tensor, conditions: Conditions, size: Size
    ) -> torch.Tensor:  # fmt: skip
        # As in diffusers, where both are rounded to the model's dtype before they are multiplied.
        dtype = conditions["text"].dtype
        times, scales = times.to(dtype) / 1000 * 1000, scales.to(dtype) * 1000
        text, pooled = conditions["text"], conditions["pooled"]
        return self.transformer(latents.to(dtype), times, scales, text, pooled, self._grid(size))

    def decode(self, latents: torch.Tensor, size: Size) -> torch.Tensor:
        cut = latents.unflatten(2, (-1, 2, 2)).unflatten(1, self._grid(size))
        return self.vae(cut.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3))


ARCH = Architecture(
    names=("FluxPipeline",),
    category="diffusion",
    model="FluxPipeline",
    runner="Denoise",
    model_type="flux",
    inputs="prompts",
    folders=("transformer", "vae"),
    packed={},
)
