"""Qwen2.5-Omni's Thinker (arXiv 2503.20215): Qwen2.5-VL that reads audio, too, with positions of time (TMRoPE)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.forward_context import forward_context
from fastkernels.models.common.descriptions import activations, towers
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers import qwen_vision as vision
from fastkernels.models.common.layers.encoder import attend_within
from fastkernels.models.multimodal import qwen2_5_vl
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmReplicatedLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.vllm import VllmLayerNorm

EPS = 1e-5  # of the audio tower's norms


def describe(config: Any) -> d.Decoder:
    parts = (*qwen2_5_vl.tower(config.vision_config), *audio_tower(config.audio_config))
    return replace(d.llama(config, d.windows(config), bias=True), tower=parts)


def audio_tower(own: Any) -> Iterator[towers.Part]:
    """The modules of the audio tower with this config."""
    hidden, heads = own.d_model, own.encoder_attention_heads
    for name, channels in (("conv1", own.num_mel_bins), ("conv2", hidden)):
        yield towers.Part(
            f"audio.{name}", "convolution", {"weight": (hidden, channels, 3), "bias": (hidden,)}
        )
        yield towers.activation(f"audio.{name}", "gelu")
    for i in range(own.encoder_layers):
        at = f"audio.layers.{i}"
        yield towers.layer_norm(f"{at}.self_attn_layer_norm", hidden)
        shapes: dict[str, tuple[int, ...]] = {"weight": (3 * hidden, hidden), "bias": (2 * hidden,)}
        yield towers.Part(f"{at}.self_attn.qkv_proj", "linear", shapes, "heads")
        sizes = {"num_heads": heads, "head_size": hidden // heads}
        yield towers.Part(f"{at}.self_attn", "attention_dense", layout="heads", arguments=sizes)
        yield towers.linear(f"{at}.self_attn.out_proj", hidden, hidden, "rows")
        yield towers.layer_norm(f"{at}.final_layer_norm", hidden)
        yield towers.linear(f"{at}.fc1", own.encoder_ffn_dim, hidden, "columns")
        yield towers.activation(f"{at}.activation_fn", own.activation_function)
        yield towers.linear(f"{at}.fc2", hidden, own.encoder_ffn_dim, "rows")
    yield towers.layer_norm("audio.ln_post", hidden)
    yield towers.linear("audio.proj", own.output_dim, hidden)


def absent(config: Any) -> list[str]:
    """Patterns of the biases that a checkpoint leaves out: keys of the audio tower have none."""
    return ["audio*.self_attn.k_proj.bias"]


def sinusoids(length: int, channels: int) -> torch.Tensor:
    """Positions [length, channels] float32: sines, then cosines, of wavelengths from 2 pi to 2 pi * 10,000."""
    steps = torch.arange(channels // 2).float() * (math.log(1e4) / (channels // 2 - 1))
    angles = torch.arange(length)[:, None] * torch.exp(-steps)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Qwen2_5OmniAudioAttention(nn.Module):
    """Self-attention within the chunks of the forward context: hidden [T, H] to the same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, hidden = config.encoder_attention_heads, config.d_model
        self.head_size = hidden // heads
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "heads of the audio tower")
        self.qkv_proj = VllmQKVParallelLinear(hidden, self.head_size, heads, return_bias=False)
        self.out_proj = VllmRowParallelLinear(hidden, hidden, return_bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(-1, 3, self.num_heads, self.head_size)
        return self.out_proj(attend_within(qkv).flatten(1))


class Qwen2_5OmniAudioEncoderLayer(nn.Module):
    """One layer with pre-normalization."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.d_model, config.encoder_ffn_dim
        self.self_attn_layer_norm = VllmLayerNorm(hidden, EPS)
        self.self_attn = Qwen2_5OmniAudioAttention(config)
        self.final_layer_norm = VllmLayerNorm(hidden, EPS)
        self.fc1 = VllmColumnParallelLinear(hidden, inner, return_bias=False)
        self.activation_fn = activation_modules.named(config.activation_function)
        self.fc2 = VllmRowParallelLinear(inner, hidden, return_bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden))
        return hidden + self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(hidden))))


class Qwen2_5OmniAudioEncoder(nn.Module):
    """config: of the audio tower. forward: frames [bins, F] of audio one after another, and their lengths, to features.

    Convolutions and attention do not leave a chunk of 2 * n_window frames, whose positions begin at 0. Two neighbors
    behind the layers are one feature.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden = config.d_model
        self.chunk = 2 * config.n_window
        self.conv1 = nn.Conv1d(config.num_mel_bins, hidden, 3, padding=1)
        self.conv2 = nn.Conv1d(hidden, hidden, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(
            Qwen2_5OmniAudioEncoderLayer(config) for _ in range(config.encoder_layers)
        )
        self.ln_post = VllmLayerNorm(hidden, EPS)
        self.proj = VllmReplicatedLinear(hidden, config.output_dim, return_bias=False)
        self._table: torch.Tensor | None = None

    def forward(self, frames: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        device, dtype = frames.device, self.conv1.weight.dtype
        sizes = [min(self.chunk, n - at) for n in lengths for at in range(0, n, self.chunk)]
        x = self._chunks(frames.to(dtype), sizes)  # [chunks, bins, longest]
        own = np.array(sizes)
        x = F.gelu(self.conv1(x))
        if own.min() < x.shape[2]:  # the second convolution reads zeros behind a shorter chunk
            x = x * torch.from_numpy(np.arange(x.shape[2]) < own[:, None]).to(device)[:, None]
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        x = x + self._positions(x.shape[1], device).to(dtype)
        states = (own + 1) // 2
        hidden = x.flatten(0, 1)
        if states.min() < x.shape[1]:
            kept = np.flatnonzero(np.arange(x.shape[1]) < states[:, None])
            hidden = hidden[torch.from_numpy(kept).to(device)]
        with forward_context(vision.metadata_of(states.tolist(), device)):
            for layer in self.layers:
                hidden = layer(hidden)
        return self.proj(self.ln_post(self._pooled(hidden, lengths)))

    def _chunks(self, frames: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        longest = max(sizes)
        if min(sizes) == longest:
            return frames.view(len(frames), -1, longest).transpose(0, 1)
        return torch.stack([F.pad(x, (0, longest - x.shape[1])) for x in frames.split(list(sizes), dim=1)])

    def _positions(self, length: int, device: torch.device) -> torch.Tensor:
        if self._table is None or self._table.device != device:
            self._table = sinusoids(self.chunk // 2, self.conv1.out_channels).to(device)
        return self._table[:length]

    def _pooled(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The means of pairs of states. The last one of an odd number has no pair, and is left out."""
        parts = hidden.split([(n + 1) // 2 for n in lengths])
        even = [part[: len(part) // 2 * 2] for part in parts]
        return (even[0] if len(even) == 1 else torch.cat(even)).unflatten(0, (-1, 2)).mean(1)


class Qwen2_5OmniThinkerForConditionalGeneration(vision.QwenVL):
    """config: transformers' Qwen2_5OmniThinkerConfig. Raises Unsupported."""

    placeholders: Mapping[str, str] = {
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    }
    tower_class = qwen2_5_vl.Qwen2_5_VisionTransformer
    sizes = ("hidden_size", "out_hidden_size")
    audio_frames = 4

    def __init__(self, config: Any) -> None:
        own = config.audio_config
        if own.output_dim != config.hidden_size:
            raise d.Unsupported(
                f"config.audio_config.output_dim={own.output_dim} is not the text model's"
                f" hidden_size={config.hidden_size}"
            )
        if own.d_model % (2 * own.encoder_attention_heads) or own.n_window < 1 or own.scale_embedding:
            raise d.Unsupported(
                f"config.audio_config: d_model={own.d_model} must be a multiple of twice"
                f" encoder_attention_heads={own.encoder_attention_heads}, n_window={own.n_window} at least 1, and"
                f" scale_embedding={own.scale_embedding} false"
            )
        if own.n_window > own.max_source_positions:
            raise d.Unsupported(
                f"config.audio_config: n_window={own.n_window} is more than its positions,"
                f" max_source_positions={own.max_source_positions}"
            )
        if own.activation_function not in activations.NAMES:
            raise d.Unsupported(
                f"config.audio_config.activation_function={own.activation_function!r} is not supported, only"
                f" {', '.join(activations.NAMES)}"
            )
        super().__init__(config)
        self.token_ids["audio"] = config.audio_token_id
        self.rate = config.position_id_per_seconds
        self.audio_bins: int = own.num_mel_bins
        self.audio = Qwen2_5OmniAudioEncoder(own)

    def audio_size(self, length: int) -> int:
        """The number of features of an audio of so many frames."""
        return (length + 1) // 2 // 2

    def encode_audio(self, frames: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Features of audio [sum of sizes, H]: frames [bins, sum of lengths]."""
        return self.audio(frames, lengths)


ARCH = Architecture(
    names=("Qwen2_5OmniThinkerForConditionalGeneration",),
    category="multimodal",
    model="Qwen2_5OmniThinkerForConditionalGeneration",
    runner="Generate",
    model_type="qwen2_5_omni_thinker",
    media=("image", "video", "audio"),
    text_of=("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
    within="thinker_config",
    packed={
        "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "qkv": ("q", "k", "v"),
    },
    absent="fastkernels.models.multimodal.qwen2_5_omni:absent",
    prefixes={"thinker.": "", "model.language_model.": "model.", "model.visual.": "visual."},
    renamed={"audio_tower.": "audio."},
    unused=("*rotary_emb.inv_freq", "*audio_bos_eos_token.weight", "talker.*", "token2wav.*"),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "Qwen/Qwen2.5-Omni-7B": {
            "text_config": {
                "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
            "audio_config": {"output_dim": 3584},
        },
        "Qwen/Qwen2.5-Omni-3B": {
            "text_config": {
                "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
                "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
            "audio_config": {"output_dim": 2048},
        },
    },
)  # fmt: skip
