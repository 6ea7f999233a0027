"""HunyuanVideo-1.5 (Tencent, 2025): videos from text by flow matching, from diffusers' folders.

The transformer is built of the drop-in blocks of its class in diffusers. The interface is that of
common/pipelines/pipeline.py, with sizes (height, width, frames). Latents are [C, f, h, w].

A text is two: what the language model reads, and the quoted words in it, which a model of letters reads. Tokens that
only pad are left out, and so are those of an image, which a video from text does not have: no other token sees them.
"""

from __future__ import annotations

import math
import re
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
from fastkernels.models.common.pipelines.pipeline import Conditions, Guidance, Pipeline, Size
from fastkernels.models.common.pipelines.time_embedding import TimeMlp
from fastkernels.models.common.pipelines.video_decoder import VideoDecoder
from fastkernels.overrides.dense_attention.attention_dense import attend
from fastkernels.overrides.diffusion.diffusers import DiffusersAdaLayerNormContinuous
from fastkernels.overrides.diffusion.diffusers_hunyuan import DiffusersHunyuanVideo15TransformerBlock
from fastkernels.overrides.diffusion.gated_residual import gated_residual
from fastkernels.overrides.diffusion.rope_axes import rope_axes
from fastkernels.overrides.diffusion.timestep_embedding import timestep_embedding
from fastkernels.overrides.linear.modules import products
from fastkernels.overrides.norm.layer_norm import layer_norm

TIME_CHANNELS, GLYPH_SIZE, REFINER_RATIO, EPS = 256, 2048, 4, 1e-6
ROUNDED = 64  # tokens of a text are padded to a multiple of it: few shapes, and few CUDA graphs
FIELDS = {
    "in_channels": 65, "out_channels": 32, "num_attention_heads": 16, "attention_head_dim": 128, "num_layers": 54,
    "num_refiner_layers": 2, "mlp_ratio": 4.0, "text_embed_dim": 3584, "text_embed_2_dim": 1472,
    "image_embed_dim": 1152, "rope_theta": 256.0, "rope_axes_dim": (16, 56, 56), "target_size": 640,
}  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {
    "patch_size": (1,), "patch_size_t": (1,), "qk_norm": ("rms_norm",), "task_type": ("i2v", "t2v"),
    "use_meanflow": (False,),
}  # fmt: skip
GUIDER = {"guidance_scale": 7.5}
GUIDER_FIXED: dict[str, tuple[Any, ...]] = {
    "guidance_rescale": (0.0,), "use_original_formulation": (False,), "start": (0.0,), "stop": (1.0,),
    "enabled": (True,),
}  # fmt: skip
STEPS, FRAMES, ASPECT = 50, 121, 9 / 16
TEXT, GLYPHS = 1000, 256  # tokens that the two models read
# The instruction of the language model, as the published weights were trained with it, and its tokens
INSTRUCTION = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:"
    "         1. The main content and theme of the video."
    "         2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "         3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "         4. background environment, light, style and atmosphere."
    "         5. camera angles, movements, and transitions used in the video."
)
INSTRUCTION_TOKENS = 108
LAYERS_LEFT_OUT = 2  # of the language model, at its end
QUOTED = re.compile(r"\"(.*?)\"|“(.*?)”")


def published() -> PlainConfig:
    """The config of the model of 480p videos from text, with one block of each kind and without text encoders."""
    return PlainConfig(
        architectures=["HunyuanVideo15Pipeline"], model_type="hunyuan_video", dtype=torch.bfloat16, options={},
        classes={
            "transformer": "HunyuanVideo15Transformer3DModel", "vae": "AutoencoderKLHunyuanVideo15",
            "scheduler": "FlowMatchEulerDiscreteScheduler", "guider": "ClassifierFreeGuidance",
        },
        parts={"transformer": {"num_layers": 1, "num_refiner_layers": 1}, "vae": {}},
    )  # fmt: skip


def glyphs_of(prompt: str) -> str | None:
    """The quoted words of a prompt, as the model of letters was trained to read them; None without any."""
    found = list(dict.fromkeys(a or b for a, b in QUOTED.findall(prompt)))
    return ". ".join(f'Text "{text}"' for text in found) + ". " if found else None


def default_size(target: int, patch: int) -> tuple[int, int]:
    """(height, width) of about target^2 pixels, with the aspect that is the closest to 9:16 and not flatter."""
    count = round((target / patch) ** 2)
    found: list[tuple[int, int]] = []
    rows, columns = count, 1
    while rows > 0:
        if max(rows, columns) <= 4 * min(rows, columns):
            found.append((rows * patch, columns * patch))
        if (columns + 1) * rows <= count:
            columns += 1
        else:
            rows -= 1
    known = [size for size in found if round(size[0] / size[1], 5) >= ASPECT]
    return min(known, key=lambda size: round(size[0] / size[1], 5))


class Mlp(nn.Module):
    """Two linear layers with SiLU between them, under the names of diffusers' FeedForward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        first = nn.Module()
        first.proj = nn.Linear(size, REFINER_RATIO * size)
        self.net = nn.ModuleList([first, nn.Identity(), nn.Linear(REFINER_RATIO * size, size)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: Any = self.net[0]
        return self.net[2](nn.functional.silu(first.proj(x)))


class RefinerAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(size, size) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(size, size)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)) for t in products((self.to_q, self.to_k, self.to_v), x))
        return self.to_out[0](attend(q, k, v, q.shape[-1] ** -0.5, mask[:, None, None]))


class Gates(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 2 * size)


class RefinerBlock(nn.Module):
    """Attention and an MLP of a text's tokens, each gated by the time and the text."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=EPS), nn.LayerNorm(size, eps=EPS)
        self.attn, self.ff, self.norm_out = RefinerAttention(size, heads), Mlp(size), Gates(size)

    def forward(self, x: torch.Tensor, embedding: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        gate, last = self.norm_out.linear(embedding).chunk(2, dim=1)
        y, norm = layer_norm(x, self.norm1.weight, self.norm1.bias, EPS), self.norm2
        x, y = gated_residual(x, self.attn(y, mask), gate, None, None, norm.weight, norm.bias, EPS)
        return gated_residual(x, self.ff(y), last)[0]


class RefinerBlocks(nn.Module):
    def __init__(self, size: int, heads: int, layers: int) -> None:
        super().__init__()
        self.refiner_blocks = nn.ModuleList(RefinerBlock(size, heads) for _ in range(layers))


class TimeText(nn.Module):
    def __init__(self, size: int, text: int) -> None:
        super().__init__()
        self.timestep_embedder, self.text_embedder = TimeMlp(TIME_CHANNELS, size), TimeMlp(text, size)


class TokenRefiner(nn.Module):
    """Hidden states of the language model [B, T, D] to tokens [B, T, C]. mask: [B, T]."""

    def __init__(self, c: Any, size: int) -> None:
        super().__init__()
        self.time_text_embed = TimeText(size, c.text_embed_dim)
        self.proj_in = nn.Linear(c.text_embed_dim, size)
        self.token_refiner = RefinerBlocks(size, c.num_attention_heads, c.num_refiner_layers)

    def forward(self, text: torch.Tensor, waves: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        share = mask.float()[..., None]
        pooled = ((text * share).sum(1) / share.sum(1)).to(text.dtype)
        embed = self.time_text_embed
        embedding = nn.functional.silu(embed.timestep_embedder(waves) + embed.text_embedder(pooled))
        x = self.proj_in(text)
        for block in self.token_refiner.refiner_blocks:
            x = block(x, embedding, mask)
        return x


class GlyphProjection(nn.Module):
    """Hidden states of the model of letters [B, T, D] to tokens [B, T, C]."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear_1, self.linear_2 = nn.Linear(size, GLYPH_SIZE), nn.Linear(GLYPH_SIZE, GLYPH_SIZE)
        self.linear_3 = nn.Linear(GLYPH_SIZE, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = layer_norm(x, self.norm.weight, self.norm.bias, self.norm.eps)
        gelu = nn.functional.gelu
        return self.linear_3(gelu(self.linear_2(gelu(self.linear_1(x)))))


class VideoEmbedding(nn.Module):
    """The product with the channels of latents; a video from text has zeros in the others, those of an image."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(channels, size, 1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        x = latents.flatten(2).transpose(1, 2)  # [B, S, C]
        return nn.functional.linear(x, self.proj.weight.flatten(1)[:, : x.shape[2]], self.proj.bias)


class HunyuanVideoTransformer(nn.Module):
    """The denoiser: latents [B, C, f, h, w] and both texts to the velocity of the latents."""

    ops = (
        "ada_layer_norm",
        "attention_dense",
        "gated_residual",
        "gelu",
        "layer_norm",
        "qk_norm_rope",
        "rope_axes",
        "timestep_embedding",
    )

    def __init__(self, c: Any) -> None:
        super().__init__()
        heads, head = c.num_attention_heads, c.attention_head_dim
        size, self.axes = heads * head, list(c.rope_axes_dim)
        if sum(self.axes) != head or len(self.axes) != 3 or any(n % 2 for n in self.axes):
            raise Unsupported(
                f"transformer: rope_axes_dim={c.rope_axes_dim!r} is not supported, only three even numbers that sum"
                f" to attention_head_dim={head}"
            )
        if not float(c.rope_theta).is_integer():
            raise Unsupported(
                f"transformer: rope_theta={c.rope_theta!r} is not supported, only whole numbers"
            )
        self.theta = int(c.rope_theta)
        self.x_embedder = VideoEmbedding(c.in_channels, size)
        self.context_embedder = TokenRefiner(c, size)
        self.context_embedder_2 = GlyphProjection(c.text_embed_2_dim, size)
        self.time_embed = nn.Module()
        self.time_embed.timestep_embedder = TimeMlp(TIME_CHANNELS, size)
        self.cond_type_embed = nn.Embedding(
            3, size
        )  # of the language model's tokens, of letters, of an image
        self.transformer_blocks = nn.ModuleList(
            DiffusersHunyuanVideo15TransformerBlock(heads, head, c.mlp_ratio) for _ in range(c.num_layers)
        )
        self.norm_out = DiffusersAdaLayerNormContinuous(size, size, elementwise_affine=False, eps=EPS)
        self.proj_out = nn.Linear(size, c.out_channels)

    def forward(
        self, latents: torch.Tensor, times: torch.Tensor, text: torch.Tensor, text_mask: torch.Tensor,
        glyphs: torch.Tensor, glyph_mask: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        waves = timestep_embedding(times, TIME_CHANNELS, True, 0.0).to(latents.dtype)
        embedder: Any = self.time_embed.timestep_embedder
        embedding = embedder(waves)
        kinds, axes = (
            self.cond_type_embed.weight,
            [torch.arange(n, device=latents.device) for n in latents.shape[2:]],
        )
        rotary = rope_axes(torch.cartesian_prod(*axes).float(), self.axes, self.theta)
        words = self.context_embedder(text, waves, text_mask) + kinds[0]
        if glyphs.shape[1]:
            words = torch.cat((self.context_embedder_2(glyphs) + kinds[1], words), dim=1)
            text_mask = torch.cat((glyph_mask, text_mask), dim=1)
        # Valid tokens come first, in their order.
        order = (~text_mask).to(torch.uint8).argsort(dim=1, stable=True)
        words = words.gather(1, order[..., None].expand_as(words))
        mask = text_mask.gather(1, order)
        video = self.x_embedder(latents)
        for block in self.transformer_blocks:
            video, words = block(video, words, embedding, mask, rotary)
        out = self.proj_out(self.norm_out(video, embedding))
        return out.transpose(1, 2).unflatten(2, latents.shape[2:])


class HunyuanVideoPipeline(Pipeline):
    """config: of a folder of diffusers. Raises Unsupported."""

    guidance = Guidance.DOUBLED
    steps = STEPS
    frames = FRAMES

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = pipeline_folder.fields(
            config, "transformer", ("HunyuanVideo15Transformer3DModel",), FIELDS, FIXED
        )
        self.config = config
        self.transformer = HunyuanVideoTransformer(c)
        self.vae: Any = VideoDecoder(config)
        channels = self.vae.channels
        if (c.in_channels, c.out_channels) != (2 * channels + 1, channels):
            raise Unsupported(
                f"transformer: in_channels={c.in_channels} and out_channels={c.out_channels} are not supported with"
                f" latent_channels={channels} of the vae, only {2 * channels + 1} and {channels}"
            )
        guider = pipeline_folder.fields(config, "guider", ("ClassifierFreeGuidance",), GUIDER, GUIDER_FIXED)
        self.scale = guider.guidance_scale
        self.multiple, self.period = self.vae.scale, self.vae.period
        self.size = default_size(c.target_size, self.vae.scale)
        self.sizes = c.text_embed_dim, c.text_embed_2_dim
        self.schedule(self.steps, (*self.size, 1))  # raises for a scheduler that is not supported

    @property
    def longest(self) -> int:
        return TEXT

    def load_texts(
        self, folder: Path, config: Any, device: torch.device, dtype: torch.dtype, seed: int | None
    ) -> None:
        lengths = (TEXT + INSTRUCTION_TOKENS, GLYPHS)
        self.texts = tuple(
            texts.load(folder, config, suffix, device, dtype, length, seed)
            for suffix, length in zip(self.encoders, lengths, strict=True)
        )
        if not getattr(self.texts[0].tokenizer, "chat_template", None):
            raise texts.CheckpointError(
                f"{folder / 'tokenizer'} has no chat_template, and prompts are messages"
            )

    def check_prompt(self, prompt: str, name: str = "the prompt") -> None:
        """See Pipeline."""
        ids = self.texts[0].counter.apply_chat_template(
            _messages(prompt), add_generation_prompt=True, return_dict=True
        )
        for found, most, what in (
            (len(ids["input_ids"]) - INSTRUCTION_TOKENS, TEXT, "the text encoder takes"),
            (
                self.texts[1].token_count(glyphs_of(prompt) or ""),
                GLYPHS,
                "of quoted words the text encoder takes",
            ),
        ):
            if found > most:
                raise ValueError(f"{name} has {found} tokens, and {what} {most}")

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str | None]) -> list[Conditions]:
        return [self._encoded(prompt or "") for prompt in prompts]

    def _encoded(self, prompt: str) -> Conditions:
        reader, letters = self.texts
        made = reader.tokenizer.apply_chat_template(
            _messages(prompt), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
            truncation=True, max_length=reader.max_length,
        )  # fmt: skip
        # Causal: what would pad behind changes nothing.
        states = reader.model(
            made["input_ids"].to(reader.model.device), output_hidden_states=True
        ).hidden_states
        text = states[-(LAYERS_LEFT_OUT + 1)][0, INSTRUCTION_TOKENS:]
        found = glyphs_of(prompt)
        glyphs = text.new_zeros(0, self.sizes[1])
        if found is not None:
            ids = letters.tokenizer(found, truncation=True, max_length=GLYPHS, return_tensors="pt").input_ids
            glyphs = letters.model(ids.to(letters.model.device)).last_hidden_state[0]
        text, text_mask = _padded(text)
        glyphs, glyph_mask = _padded(glyphs)
        return {"text": text, "text_mask": text_mask, "glyphs": glyphs, "glyph_mask": glyph_mask}

    def _grid(self, size: Size) -> tuple[int, int, int]:
        height, width, frames = size
        return (frames - 1) // self.period + 1, height // self.multiple, width // self.multiple

    def tokens(self, size: Size) -> int:
        return math.prod(self._grid(size)) + TEXT + GLYPHS

    def schedule(self, steps: int, size: Size, first: int = 0) -> schedules.Schedule:
        return schedules.flow_matching(self.config, steps, math.prod(self._grid(size)))

    def noise(self, generator: torch.Generator, size: Size, dtype: torch.dtype) -> torch.Tensor:
        shape = (1, self.vae.channels, *self._grid(size))
        return torch.randn(shape, generator=generator, dtype=dtype)

    def begin(self, noise: torch.Tensor) -> torch.Tensor:
        return noise

    def forward(
        self, latents: torch.Tensor, times: torch.Tensor, scales: torch.Tensor, conditions: Conditions, size: Size
    ) -> torch.Tensor:  # fmt: skip
        dtype = conditions["text"].dtype
        return self.transformer(latents.to(dtype), times.to(dtype), **conditions)

    def decode(self, latents: torch.Tensor, size: Size) -> torch.Tensor:
        return self.vae(latents)


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": prompt or " "}]


def _padded(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T, D] with zeros behind them, and which of them are valid [T']."""
    length = -(-len(tokens) // ROUNDED) * ROUNDED
    mask = torch.arange(length, device=tokens.device) < len(tokens)
    return nn.functional.pad(tokens, (0, 0, 0, length - len(tokens))), mask


ARCH = Architecture(
    names=("HunyuanVideo15Pipeline",),
    category="diffusion",
    model="HunyuanVideoPipeline",
    runner="DenoiseVideo",
    model_type="hunyuan_video",
    inputs="prompts",
    folders=("transformer", "vae"),
    packed={},
    unused=("transformer.image_embedder.*", "vae.encoder.*"),
)
