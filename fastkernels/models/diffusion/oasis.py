"""Oasis 500M (Decart and Etched, 2024): a world model that draws the next frame of a game from actions.

A transformer with attention within each frame and, patch by patch, along time denoises one frame at a time (diffusion
forcing, Chen et al., arXiv 2407.01392); a vision transformer turns frames into latents and back.

Every model of the runner Rollout has this interface. Frames are uint8 [N, 3, height, width] and latents float32
[N, *latent]:

    size, latent      (height, width) of a frame, and the shape of its latents
    tokens            of one frame
    window            frames that the model sees, the one that it makes included
    steps             denoising steps of a frame, by default
    schedule(steps)   those steps, and the time of the frames before
    read_action(name, action)  a checked action, float32 [A]. Raises ValueError, which begins with the name
    noise(generator)  the first latents [1, *latent] of a frame, on the CPU
    encode, decode    frames to latents and back
    modulations(times, actions)  what depends on time [N] and action [N, A] of a frame: [N, M]
    new_cache(slots)  what the layers keep of earlier frames, for that many requests
    forward(latents, modulations, slots, places, cache)  the velocity [B, F, *latent] of F frames at the places
                      [B], [B] + 1, ... of the windows that `slots` [B] hold; their keys and values are stored

config.json is ours, as Oasis has none. It lies next to oasis500m.safetensors and vit-l-20.safetensors:

    {"architectures": ["Oasis"], "model_type": "oasis", "dtype": "float16"}

Fields that are left out are those of that checkpoint.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.pipelines.schedules import Schedule
from fastkernels.overrides.dense_attention.attention_dense import attend
from fastkernels.overrides.dense_attention.frame_attention import frame_attention
from fastkernels.overrides.diffusion.ada_layer_norm import ada_layer_norm
from fastkernels.overrides.diffusion.gated_residual import gated_residual
from fastkernels.overrides.diffusion.timestep_embedding import timestep_embedding
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.rope.rope_nd import rope_nd

EPS, TIME_CHANNELS, THETA = 1e-6, 256, 10000.0
LEVELS, KNOWN_LEVEL, NOISE_LIMIT = 1000, 14, 20.0  # noise levels; that of frames before; clamp of noise
FACTOR = 0.07843137255  # latents of the transformer are those of the image model times this
PIXEL_FREQUENCY = 256  # of the transformer's rotations by row and column
KEYS = (
    "inventory", "ESC", *(f"hotbar.{i}" for i in range(1, 10)), "forward", "back", "left", "right", "cameraX",
    "cameraY", "jump", "sneak", "sprint", "swapHands", "attack", "use", "pickItem", "drop",
)  # fmt: skip
DEFAULTS = {
    "input_h": 18, "input_w": 32, "patch_size": 2, "in_channels": 16, "hidden_size": 1024, "depth": 16, "num_heads": 16,
    "mlp_ratio": 4.0, "external_cond_dim": 25, "max_frames": 32,
}  # fmt: skip
VAE_DEFAULTS = {
    "input_height": 360, "input_width": 640, "patch_size": 20, "latent_dim": 16, "enc_dim": 1024, "enc_depth": 6,
    "enc_heads": 16, "dec_dim": 1024, "dec_depth": 12, "dec_heads": 16, "mlp_ratio": 4.0,
}  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, checked, with defaults. Raises Unsupported, which names the field and the value."""
    given = raw.get("vae", {})
    if not isinstance(given, Mapping):
        raise Unsupported(f"config.vae={given!r} is not an object")
    made, vae = {**DEFAULTS, **raw}, {**VAE_DEFAULTS, **given}
    for prefix, fields, defaults in (("", made, DEFAULTS), ("vae.", vae, VAE_DEFAULTS)):
        for name, default in defaults.items():
            value, kinds = fields[name], (int, float) if isinstance(default, float) else (int,)
            if type(value) not in kinds or not 0 < value < 1 << 24:
                wanted = "numbers" if isinstance(default, float) else "integers"
                raise Unsupported(f"config.{prefix}{name}={value!r} is not supported, only {wanted} above 0")
    for name in vae:
        if name not in VAE_DEFAULTS:
            raise Unsupported(f"config.vae.{name}={vae[name]!r} is not supported: there is no such field")
    for prefix, size, heads, part in (
        ("", made["hidden_size"], made["num_heads"], 4), ("vae.", vae["enc_dim"], vae["enc_heads"], 2),
        ("vae.", vae["dec_dim"], vae["dec_heads"], 2),
    ):  # fmt: skip
        if size % heads or size // heads % part:
            raise Unsupported(
                f"config.{prefix}: {heads} heads of {size} channels are not supported: a head must have a multiple of"
                f" {part}"
            )
    grid = vae["input_height"] / vae["patch_size"], vae["input_width"] / vae["patch_size"]
    if grid != (made["input_h"], made["input_w"]) or vae["latent_dim"] != made["in_channels"]:
        raise Unsupported(
            f"config.vae: latents of {grid[0]:g} x {grid[1]:g} with {vae['latent_dim']} channels are not the"
            f" transformer's {made['input_h']} x {made['input_w']} with {made['in_channels']}"
        )
    if made["input_h"] % made["patch_size"] or made["input_w"] % made["patch_size"]:
        raise Unsupported(
            f"config.patch_size={made['patch_size']} does not divide {made['input_h']} x {made['input_w']}"
        )
    return {**made, "vae": vae}


def pixel_table(rows: int, columns: int, channels: int, head: int, frequency: float) -> torch.Tensor:
    """Angles [rows * columns, head]: `channels` turn by the row, as many by the column, and the rest not at all."""
    steps = torch.linspace(1.0, frequency / 2, channels // 2, dtype=torch.float32) * math.pi
    places = (torch.linspace(-1, 1, n, dtype=torch.float32) for n in (rows, columns))
    by_row, by_column = ((p[:, None] * steps).repeat_interleave(2, dim=1) for p in places)
    angles = torch.zeros(rows, columns, head, dtype=torch.float32)
    n = by_row.shape[1]
    angles[..., :n], angles[..., n : 2 * n] = by_row[:, None], by_column
    return angles.flatten(0, 1)


class Rotations(nn.Module):
    """Cosines and sines of angles, in float32."""

    def __init__(self, angles: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)


class PatchEmbed(nn.Module):
    """The convolution of non-overlapping patches: [N, C, H, W] to [N, T, D]."""

    def __init__(self, channels: int, patch: int, size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, size, patch, stride=patch)
        self.patch = patch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.patch
        cut = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [N, C, h, p, w, p]
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Mlp(nn.Module):
    """Two linear layers with GELU between them. approximate: 'none' or 'tanh'."""

    def __init__(self, size: int, inner: int, approximate: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = linear_gelu(x, self.fc1.weight, self.fc1.bias, self.approximate)
        return linear(hidden, self.fc2.weight, self.fc2.bias)


class TimestepEmbedder(nn.Module):
    """Times [N] to [N, D]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_CHANNELS, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        waves = timestep_embedding(times, TIME_CHANNELS, True, 0.0).to(self.mlp[0].weight.dtype)
        return self.mlp(waves)


def attend_patches(qkv: torch.Tensor, heads: int, table: Rotations) -> torch.Tensor:
    """Attention within each frame: qkv [N, T, 3 D] to [N, T, D]."""
    parts = qkv.unflatten(2, (3 * heads, -1))
    turned = rope_nd(parts[:, :, : 2 * heads], table.cos, table.sin, False)
    q, k = turned.chunk(2, dim=2)
    return attend(q, k, parts[:, :, 2 * heads :], q.shape[-1] ** -0.5)


class Attention(nn.Module):
    """The projections of an attention layer of the transformer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size)

    def products(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.to_qkv.weight, None)

    def out(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.to_out.weight, self.to_out.bias)


class Block(nn.Module):
    """Attention within frames and an MLP, then attention along time and an MLP. Its norms have no weights."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        for kind in ("s", "t"):
            self.add_module(f"{kind}_attn", Attention(size))
            self.add_module(f"{kind}_mlp", Mlp(size, inner, "tanh"))
            self.add_module(f"{kind}_adaLN_modulation", nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size)))


class FinalLayer(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(size, 2 * size))


class OasisTransformer(nn.Module):
    """The denoiser. See the module's docstring for `modulations` and `forward`."""

    ops = (
        "ada_layer_norm", "attention_dense", "frame_attention", "gated_residual", "linear", "linear_gelu", "rope_nd",
        "timestep_embedding",
    )  # fmt: skip

    def __init__(self, c: Any) -> None:
        super().__init__()
        size, self.heads, self.window = c.hidden_size, c.num_heads, c.max_frames
        self.size, self.patch, self.channels = size, c.patch_size, c.in_channels
        self.head = size // self.heads
        self.grid = c.input_h // c.patch_size, c.input_w // c.patch_size
        self.x_embedder = PatchEmbed(c.in_channels, c.patch_size, size)
        self.t_embedder = TimestepEmbedder(size)
        self.external_cond = nn.Linear(c.external_cond_dim, size)
        inner = int(size * c.mlp_ratio)
        self.blocks = nn.ModuleList(Block(size, inner) for _ in range(c.depth))
        self.final_layer = FinalLayer(size, c.patch_size**2 * c.in_channels)
        self.pixels = Rotations(pixel_table(*self.grid, self.head // 2, self.head, PIXEL_FREQUENCY))
        steps = THETA ** -(torch.arange(0, self.head, 2, dtype=torch.float32) / self.head)
        times = torch.arange(self.window, dtype=torch.float32)[:, None] * steps
        self.times = Rotations(times.repeat_interleave(2, dim=1))

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    def modulations(self, times: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        cond = self.external_cond
        found = self.t_embedder(times) + linear(actions.to(cond.weight.dtype), cond.weight, cond.bias)
        found = nn.functional.silu(found)
        layers = [getattr(b, f"{kind}_adaLN_modulation")[1] for b in self.blocks for kind in ("s", "t")]
        layers.append(self.final_layer.adaLN_modulation[1])
        return torch.cat([linear(found, layer.weight, layer.bias) for layer in layers], dim=1)

    def new_cache(self, slots: int) -> torch.Tensor:
        """Keys and values [2, layers, slots, W, T, heads, head size]."""
        weight = self.external_cond.weight
        shape = (2, len(self.blocks), slots, self.window, self.tokens, self.heads, self.head)
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def forward(
        self, latents: torch.Tensor, modulations: torch.Tensor, slots: torch.Tensor, places: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        batch, frames = latents.shape[:2]
        x = self.x_embedder(latents.flatten(0, 1).to(self.external_cond.weight.dtype))  # [B F, T, D]
        parts = modulations.flatten(0, 1).unflatten(1, (-1, self.size)).unbind(1)  # [B F, D] each
        y = ada_layer_norm(x, parts[1], parts[0])
        at = 0
        for i, block in enumerate(self.blocks):
            for kind in ("s", "t"):
                attn, mlp = getattr(block, f"{kind}_attn"), getattr(block, f"{kind}_mlp")
                qkv = attn.products(y)
                if kind == "s":
                    found = attend_patches(qkv, self.heads, self.pixels)
                else:
                    shape = (batch, frames, self.tokens, 3, self.heads, self.head)
                    found = frame_attention(
                        qkv.view(shape), self.times.cos, self.times.sin, cache[0, i], cache[1, i], slots, places,
                        self.head**-0.5,
                    ).view(x.shape)  # fmt: skip
                _, _, gate, shift, scale, last_gate, next_shift, next_scale = parts[at : at + 8]
                x, y = gated_residual(x, attn.out(found), gate, scale, shift)
                x, y = gated_residual(x, mlp(y), last_gate, next_scale, next_shift)
                at += 6
        last = self.final_layer.linear
        out = linear(y, last.weight, last.bias).unflatten(2, (self.patch, self.patch, self.channels))
        out = out.unflatten(1, self.grid)  # [B F, h, w, p, p, C]
        return out.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3).unflatten(0, (batch, frames))


class VaeAttention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)


class VaeBlock(nn.Module):
    """Attention within a frame and an MLP, each behind a norm."""

    def __init__(self, size: int, heads: int, ratio: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=EPS), nn.LayerNorm(size, eps=EPS)
        self.attn, self.mlp = VaeAttention(size), Mlp(size, int(size * ratio), "none")
        self.heads = heads

    def forward(self, x: torch.Tensor, table: Rotations) -> torch.Tensor:
        qkv, proj, norm = self.attn.qkv, self.attn.proj, self.norm2
        y = layer_norm(x, self.norm1.weight, self.norm1.bias, EPS)
        y = attend_patches(linear(y, qkv.weight, qkv.bias), self.heads, table)
        y = linear(y, proj.weight, proj.bias)
        x, y = gated_residual(x, y, None, None, None, norm.weight, norm.bias, EPS)
        return gated_residual(x, self.mlp(y), None)[0]


class OasisVae(nn.Module):
    """The vision transformers that encode and decode frames."""

    ops = ("attention_dense", "gated_residual", "layer_norm", "linear", "linear_gelu", "rope_nd")

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.patch, self.latent_dim = c["patch_size"], c["latent_dim"]
        self.size = c["input_height"], c["input_width"]
        self.grid = self.size[0] // self.patch, self.size[1] // self.patch
        self.patch_embed = PatchEmbed(3, self.patch, c["enc_dim"])
        self.encoder, self.decoder = (
            nn.ModuleList(
                VaeBlock(c[f"{kind}_dim"], c[f"{kind}_heads"], c["mlp_ratio"])
                for _ in range(c[f"{kind}_depth"])
            )
            for kind in ("enc", "dec")
        )
        self.enc_norm, self.dec_norm = (nn.LayerNorm(c[f"{kind}_dim"], eps=EPS) for kind in ("enc", "dec"))
        self.quant_conv = nn.Linear(c["enc_dim"], 2 * self.latent_dim)
        self.post_quant_conv = nn.Linear(self.latent_dim, c["dec_dim"])
        self.predictor = nn.Linear(c["dec_dim"], 3 * self.patch**2)
        self.tables = nn.ModuleDict()
        for kind in ("enc", "dec"):
            head = c[f"{kind}_dim"] // c[f"{kind}_heads"]
            self.tables[kind] = Rotations(
                pixel_table(*self.grid, head // 4, head, self.grid[0] * self.grid[1])
            )

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Frames [N, 3, H, W] in -1 to 1 to means [N, C, h, w]."""
        x = self.patch_embed(x)
        for block in self.encoder:
            x = block(x, self.tables["enc"])
        x = layer_norm(x, self.enc_norm.weight, self.enc_norm.bias, EPS)
        mean = linear(x, self.quant_conv.weight, self.quant_conv.bias)[..., : self.latent_dim]
        return mean.transpose(1, 2).unflatten(2, self.grid)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [N, C, h, w] to frames [N, 3, H, W] in about -1 to 1."""
        x = linear(latents.flatten(2).transpose(1, 2), self.post_quant_conv.weight, self.post_quant_conv.bias)
        for block in self.decoder:
            x = block(x, self.tables["dec"])
        x = layer_norm(x, self.dec_norm.weight, self.dec_norm.bias, EPS)
        x = linear(x, self.predictor.weight, self.predictor.bias).unflatten(2, (3, self.patch, self.patch))
        x = x.unflatten(1, self.grid)  # [N, h, w, 3, p, p]
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def noise_levels() -> np.ndarray:
    """The share of the signal [LEVELS] at each noise level: a sigmoid schedule from -3 to 3 (arXiv 2212.11972)."""
    # In these steps and dtypes, as published models are run with those numbers.
    at = torch.linspace(0, LEVELS, LEVELS + 1, dtype=torch.float64, device="cpu") / LEVELS
    start, end = (torch.tensor(float(v), device="cpu", dtype=torch.float32).sigmoid() for v in (-3, 3))
    kept = (end - (at * 6 - 3).sigmoid()) / (end - start)
    kept = kept / kept[0]
    betas = (1 - kept[1:] / kept[:-1]).clip(0, 0.999).float()
    return torch.cumprod(1 - betas, dim=0).double().numpy()


class Oasis(nn.Module):
    """config: the fields of read_config. See the module's docstring."""

    steps = 10

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dit, self.vae = OasisTransformer(config), OasisVae(config.vae)
        self.size, self.window = self.vae.size, self.dit.window
        self.latent = (config.in_channels, config.input_h, config.input_w)
        self.tokens = self.dit.tokens
        self.num_actions: int = config.external_cond_dim
        self._kept = noise_levels()

    @property
    def action_names(self) -> Sequence[str]:
        return KEYS if self.num_actions == len(KEYS) else ()

    def schedule(self, steps: int) -> tuple[Schedule, float]:
        """DDIM steps of a model of velocities, x' = keep * x + add * v. Raises ValueError for too many."""
        if steps > LEVELS:
            raise ValueError(f"num_inference_steps must be at most {LEVELS}, got {steps}")
        times = np.linspace(-1, LEVELS - 1, steps + 1, dtype=np.float32)[::-1].astype(np.int64)
        now = self._kept[times[:-1]]
        then = np.append(self._kept[times[1:-1]], 1.0)  # the last step ends without noise
        signal, noise, to_signal, to_noise = (np.sqrt(a) for a in (now, 1 - now, then, 1 - then))
        keep, add = to_signal * signal + to_noise * noise, to_noise * signal - to_signal * noise
        made = [a.astype(np.float32) for a in (times[:-1], np.ones(steps), keep, add)]
        return Schedule(made[0], made[1], made[2], made[3]), float(KNOWN_LEVEL)

    def read_action(self, name: str, action: Any) -> np.ndarray:
        """An action as float32 [A]: numbers, or {name: number} for those of KEYS that are not 0.

        Keys are from 0 to 1, and the camera's turns from -1 to 1.
        """
        names, count = self.action_names, self.num_actions
        if isinstance(action, Mapping):
            if unknown := [key for key in action if key not in names]:
                known = ", ".join(names) or "none: give a list of numbers"
                raise ValueError(f"{name} has the unknown key {reprlib.repr(unknown[0])}; known: {known}")
            values = [action.get(key, 0) for key in names]
        elif isinstance(action, (list, tuple, np.ndarray)) and len(action) == count:
            values = list(action)
        else:
            raise ValueError(
                f"{name} must be an object of keys, or a list of {count} numbers, got {reprlib.repr(action)}"
            )
        for i, value in enumerate(values):
            number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
            least = -1 if not names or names[i].startswith("camera") else 0
            if not number or not least <= value <= 1:
                which = names[i] if names else f"number {i}"
                raise ValueError(
                    f"{name}: {which} must be a number from {least} to 1, got {reprlib.repr(value)}"
                )
        return np.asarray(values, np.float32)

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        x = (frames.float() / 255 * 2 - 1).to(self.vae.quant_conv.weight.dtype)
        return self.vae.encode(x).float() * FACTOR

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        x = self.vae.decode((latents / FACTOR).to(self.vae.quant_conv.weight.dtype))
        return ((x.float() + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8)

    def noise(self, generator: torch.Generator) -> torch.Tensor:
        """The first latents [1, *latent] of a frame."""
        made = torch.randn((1, *self.latent), generator=generator)
        return made.clamp(-NOISE_LIMIT, NOISE_LIMIT)

    def modulations(self, times: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.dit.modulations(times, actions)

    def new_cache(self, slots: int) -> torch.Tensor:
        return self.dit.new_cache(slots)

    def forward(
        self, latents: torch.Tensor, modulations: torch.Tensor, slots: torch.Tensor, places: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return self.dit(latents, modulations, slots, places, cache)


ARCH = Architecture(
    names=("Oasis",),
    category="diffusion",
    model="Oasis",
    runner="Rollout",
    inputs="frames",
    model_type="oasis",
    packed={},
    renamed={
        "x_embedder.": "dit.x_embedder.",
        "t_embedder.": "dit.t_embedder.",
        "external_cond.": "dit.external_cond.",
        "blocks.": "dit.blocks.",
        "final_layer.": "dit.final_layer.",
        "patch_embed.": "vae.patch_embed.",
        "encoder.": "vae.encoder.",
        "decoder.": "vae.decoder.",
        "enc_norm.": "vae.enc_norm.",
        "dec_norm.": "vae.dec_norm.",
        "quant_conv.": "vae.quant_conv.",
        "post_quant_conv.": "vae.post_quant_conv.",
        "predictor.": "vae.predictor.",
    },
    unused=("*rotary_emb.freqs",),
    own_config="fastkernels.models.diffusion.oasis:read_config",
)
