"""Qwen2-VL (arXiv 2409.12191): Qwen2 with images of any size, and positions of three axes (M-RoPE)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastkernels.core.forward_context import forward_context
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions import towers
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers import qwen_vision as vision
from fastkernels.models.common.layers.media import Grid
from fastkernels.overrides.linear.vllm import VllmColumnParallelLinear, VllmRowParallelLinear
from fastkernels.overrides.norm.vllm import VllmLayerNorm

EPS = 1e-6


def describe(config: Any) -> d.Decoder:
    return replace(d.llama(config, d.windows(config), bias=True), tower=tuple(tower(config.vision_config)))


def tower(own: Any) -> Iterator[towers.Part]:
    """The modules of the vision tower with this config."""
    wide = own.embed_dim * own.spatial_merge_size**2
    yield towers.patch_embed("visual.patch_embed.proj", own, own.embed_dim, bias=False)
    yield from towers.blocks("visual.blocks", own, own.embed_dim, int(own.embed_dim * own.mlp_ratio))
    yield towers.layer_norm("visual.merger.ln_q", own.embed_dim)
    yield towers.linear("visual.merger.mlp.0", wide, wide, "columns")
    yield towers.activation("visual.merger.mlp.1", "gelu")
    yield towers.linear("visual.merger.mlp.2", own.hidden_size, wide, "rows")


class Qwen2VisionMLP(nn.Module):
    """Up projection, activation, down projection."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.embed_dim, int(config.embed_dim * config.mlp_ratio)
        self.fc1 = VllmColumnParallelLinear(size, inner, return_bias=False)
        self.act = activation_modules.named(config.hidden_act)
        self.fc2 = VllmRowParallelLinear(inner, size, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Qwen2VisionBlock(vision.VisionBlock):
    """One layer of the vision tower."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm1 = VllmLayerNorm(config.embed_dim, EPS)
        self.attn = vision.VisionAttention(config.embed_dim, config.num_heads)
        self.norm2 = VllmLayerNorm(config.embed_dim, EPS)
        self.mlp = Qwen2VisionMLP(config)


class Qwen2VisionPatchMerger(nn.Module):
    """Patches [P, H] to features [P / merge^2, size]."""

    def __init__(self, size: int, hidden: int, merge: int) -> None:
        super().__init__()
        self.wide = hidden * merge * merge
        self.ln_q = VllmLayerNorm(hidden, EPS)
        self.mlp = vision.TwoLinears((self.wide, self.wide, size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.ln_q(hidden).view(-1, self.wide))


class Qwen2VisionTransformer(nn.Module):
    """config: of the vision tower. forward: patches [P, C * t * p * p] and grids to features."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.head_size = config, config.embed_dim // config.num_heads
        self.patch_embed = vision.VisionPatchEmbed(
            config.in_channels, config.temporal_patch_size, config.patch_size, config.embed_dim, bias=False
        )
        self.blocks = nn.ModuleList(Qwen2VisionBlock(config) for _ in range(config.depth))
        self.merger = Qwen2VisionPatchMerger(config.hidden_size, config.embed_dim, config.spatial_merge_size)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        hidden = self.patch_embed(patches)
        positions = torch.arange(len(hidden), device=hidden.device)
        merge = self.config.spatial_merge_size
        table = vision.table_of(grids, merge, self.head_size, vision.THETA, hidden.device)
        with forward_context(vision.metadata_of(vision.steps_of(grids), hidden.device)):
            for block in self.blocks:
                hidden = block(hidden, positions, table)
        return self.merger(hidden)


class Qwen2VLForConditionalGeneration(vision.QwenVL):
    """config: transformers' Qwen2VLConfig. Raises Unsupported."""

    tower_class = Qwen2VisionTransformer
    sizes = ("embed_dim", "hidden_size")


ARCH = Architecture(
    names=("Qwen2VLForConditionalGeneration",),
    category="multimodal",
    model="Qwen2VLForConditionalGeneration",
    runner="Generate",
    model_type="qwen2_vl",
    media=("image", "video"),
    prefixes={"model.language_model.": "model.", "model.visual.": "visual."},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "Qwen/Qwen2-VL-2B-Instruct": {
            "text_config": {
                "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
                "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"hidden_size": 1536},
            "tie_word_embeddings": True,
        },
        "Qwen/Qwen2-VL-7B-Instruct": {
            "text_config": {
                "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"hidden_size": 3584},
        },
    },
)  # fmt: skip
