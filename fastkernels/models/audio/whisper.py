"""Whisper (arXiv 2212.04356): a decoder of text that attends to an encoder of speech.

An encoder-decoder is a decoder with these methods more: `source_shape`, the shape of what the encoder reads, and
`source_length`, the number of states that it makes of it; encode_source(features [n, *source_shape]) returns
[n * source_length, H], and store_source(states, slot_mapping) writes the keys and values of cross attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.forward_context import forward_context
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions import towers
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers.cross import CrossAttention
from fastkernels.models.common.layers.decoder import Decoder, DecoderMlp
from fastkernels.models.common.layers.encoder import attend_within
from fastkernels.models.common.layers.qwen_vision import metadata_of
from fastkernels.overrides.linear.vllm import VllmQKVParallelLinear, VllmRowParallelLinear
from fastkernels.overrides.norm.vllm import VllmLayerNorm

EPS = 1e-5
NORM = d.Norm("layer", EPS, bias=True)


def describe(config: Any) -> d.Decoder:
    heads, hidden = config.decoder_attention_heads, config.d_model
    if hidden % heads or hidden % config.encoder_attention_heads:
        raise d.Unsupported(
            f"config.d_model={hidden} is not a multiple of decoder_attention_heads={heads} and"
            f" encoder_attention_heads={config.encoder_attention_heads}"
        )
    layer = d.Layer(
        d.Attention(heads, heads, hidden // heads, bias=True, key_bias=False, out_bias=True),
        _mlp(config, config.decoder_ffn_dim), before_attention=NORM, before_mlp=NORM,
        cross=d.Cross(heads, hidden // heads, NORM),
        names={"before_attention": "self_attn_layer_norm", "before_mlp": "final_layer_norm"},
    )  # fmt: skip
    return d.Decoder(
        config.vocab_size, hidden, (layer,) * config.decoder_layers, NORM, bool(config.tie_word_embeddings),
        embedding_scale=hidden**0.5 if config.scale_embedding else 1.0,
        positions=d.Positions(config.max_target_positions), tower=tuple(tower(config)),
    )  # fmt: skip


def _mlp(config: Any, inner: int) -> d.Mlp:
    return d.Mlp(inner, d.activation(config, "activation_function"), gated=False, bias=True)


def tower(config: Any) -> Iterator[towers.Part]:
    """The modules of the encoder."""
    hidden, inner, heads = config.d_model, config.encoder_ffn_dim, config.encoder_attention_heads
    for name, channels in (("conv1", config.num_mel_bins), ("conv2", hidden)):
        yield towers.Part(
            f"audio.{name}", "convolution", {"weight": (hidden, channels, 3), "bias": (hidden,)}
        )
        yield towers.activation(f"audio.{name}", "gelu")
    yield towers.Part("audio.embed_positions", "embedding", {"weight": (config.max_source_positions, hidden)})
    for i in range(config.encoder_layers):
        at = f"audio.layers.{i}"
        yield towers.layer_norm(f"{at}.self_attn_layer_norm", hidden)
        shapes: dict[str, tuple[int, ...]] = {"weight": (3 * hidden, hidden), "bias": (2 * hidden,)}
        yield towers.Part(f"{at}.self_attn.qkv_proj", "linear", shapes, "heads")
        sizes = {"num_heads": heads, "head_size": hidden // heads}
        yield towers.Part(f"{at}.self_attn", "attention_dense", layout="heads", arguments=sizes)
        yield towers.linear(f"{at}.self_attn.o_proj", hidden, hidden, "rows")
        yield towers.layer_norm(f"{at}.final_layer_norm", hidden)
        yield towers.linear(f"{at}.mlp.up_proj", inner, hidden, "columns")
        yield towers.activation(f"{at}.mlp.act_fn", config.activation_function)
        yield towers.linear(f"{at}.mlp.down_proj", hidden, inner, "rows")
    yield towers.layer_norm("audio.layer_norm", hidden)


def absent(config: Any) -> list[str]:
    """Patterns of the biases that a checkpoint leaves out: keys have none."""
    return ["*.self_attn.k_proj.bias"]


class WhisperEncoderAttention(nn.Module):
    """Self-attention within each source: hidden [T, H] to the same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, hidden = config.encoder_attention_heads, config.d_model
        self.head_size = hidden // heads
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "encoder_attention_heads")
        self.qkv_proj = VllmQKVParallelLinear(hidden, self.head_size, heads, return_bias=False)
        self.o_proj = VllmRowParallelLinear(hidden, hidden, return_bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(-1, 3, self.num_heads, self.head_size)
        return self.o_proj(attend_within(qkv).flatten(1))


class WhisperEncoderLayer(nn.Module):
    """One layer with pre-normalization."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn_layer_norm = VllmLayerNorm(config.d_model, EPS)
        self.self_attn = WhisperEncoderAttention(config)
        self.final_layer_norm = VllmLayerNorm(config.d_model, EPS)
        self.mlp = DecoderMlp(_mlp(config, config.encoder_ffn_dim), config.d_model, "")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden))
        return hidden + self.mlp(self.final_layer_norm(hidden))


class WhisperEncoder(nn.Module):
    """Two convolutions, the second with stride 2, and layers: features [n, bins, 2 * L] to [n * L, H]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, hidden, 3, padding=1)
        self.conv2 = nn.Conv1d(hidden, hidden, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, hidden)
        self.layers = nn.ModuleList(WhisperEncoderLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = VllmLayerNorm(hidden, EPS)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(features.to(self.conv1.weight.dtype)))))
        hidden = (x.transpose(1, 2) + self.embed_positions.weight).flatten(0, 1)
        with forward_context(metadata_of([x.shape[2]] * len(x), hidden.device)):
            for layer in self.layers:
                hidden = layer(hidden)
        return self.layer_norm(hidden)


class WhisperForConditionalGeneration(Decoder):
    """config: transformers' WhisperConfig. Raises Unsupported."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.audio = WhisperEncoder(config)
        self.source_length: int = config.max_source_positions
        self.source_shape = (config.num_mel_bins, 2 * self.source_length)
        self.cross = [m for m in self.modules() if isinstance(m, CrossAttention)]

    def encode_source(self, features: torch.Tensor) -> torch.Tensor:
        return self.audio(features)

    def store_source(self, states: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        for layer in self.cross:
            layer.store(states, slot_mapping)


ARCH = Architecture(
    names=("WhisperForConditionalGeneration",),
    category="audio",
    model="WhisperForConditionalGeneration",
    runner="Generate",
    model_type="whisper",
    media=("audio",),
    packed={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    absent="fastkernels.models.audio.whisper:absent",
    renamed={
        "model.decoder.layer_norm.": "model.norm.", "model.decoder.": "model.", "model.encoder.": "audio.",
        "proj_out.": "lm_head.",
    },
    parts={"fc1": "mlp.up_proj", "fc2": "mlp.down_proj", "out_proj": "o_proj"},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "openai/whisper-base": {
            "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
            "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": 51865,
        },
        "openai/whisper-large-v3": {
            "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
            "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "vocab_size": 51866,
            "num_mel_bins": 128,
        },
    },
    sizes={
        "hidden_size": "d_model", "intermediate_size": "decoder_ffn_dim", "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads", "max_position_embeddings": "max_target_positions",
    },
)  # fmt: skip
