"""Qwen2.5-VL (arXiv 2502.13923): Qwen2-VL whose vision tower attends within windows in most of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from fastkernels.core.forward_context import forward_context
from fastkernels.models.common.descriptions import activations, towers
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers import qwen_vision as vision
from fastkernels.models.common.layers.media import Grid
from fastkernels.overrides.linear.vllm import VllmMergedColumnParallelLinear, VllmRowParallelLinear
from fastkernels.overrides.norm.vllm import VllmRMSNorm

EPS = 1e-6


def describe(config: Any) -> d.Decoder:
    return replace(d.llama(config, d.windows(config), bias=True), tower=tuple(tower(config.vision_config)))


def tower(own: Any) -> Iterator[towers.Part]:
    """The modules of the vision tower with this config."""
    hidden, wide = own.hidden_size, own.hidden_size * own.spatial_merge_size**2
    yield towers.patch_embed("visual.patch_embed.proj", own, hidden, bias=False)
    yield from towers.blocks("visual.blocks", own, hidden, own.intermediate_size, gated=True)
    yield towers.rms_norm("visual.merger.ln_q", hidden)
    yield towers.linear("visual.merger.mlp.0", wide, wide, "columns")
    yield towers.activation("visual.merger.mlp.1", "gelu")
    yield towers.linear("visual.merger.mlp.2", own.out_hidden_size, wide, "rows")


@lru_cache(maxsize=64)
def windows(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(order of the features of a medium, number of features of each window).

    grid: of the patches. side: features along a window, which is cut at the right and lower border. Windows follow row
    after row, step after step.
    """
    steps, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    step, row, column = np.indices((steps, rows, columns)).reshape(3, -1)
    across = -(-columns // side)
    window = (step * -(-rows // side) + row // side) * across + column // side
    return np.argsort(window, kind="stable"), np.bincount(window)


class Qwen2_5_VisionMLP(nn.Module):
    """A gated MLP with biases."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = VllmMergedColumnParallelLinear(size, [inner] * 2, return_bias=False)
        self.act_fn = activation_modules.make(activations.NAMES[config.hidden_act], gated=True)
        self.down_proj = VllmRowParallelLinear(inner, size, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Qwen2_5_VisionBlock(vision.VisionBlock):
    """One layer of the vision tower."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm1 = VllmRMSNorm(config.hidden_size, eps=EPS)
        self.attn = vision.VisionAttention(config.hidden_size, config.num_heads)
        self.norm2 = VllmRMSNorm(config.hidden_size, eps=EPS)
        self.mlp = Qwen2_5_VisionMLP(config)


class Qwen2_5_VisionPatchMerger(nn.Module):
    """Patches [P, H] to features [P / merge^2, size]."""

    def __init__(self, size: int, hidden: int, merge: int) -> None:
        super().__init__()
        self.wide = hidden * merge * merge
        self.ln_q = VllmRMSNorm(hidden, eps=EPS)
        self.mlp = vision.TwoLinears((self.wide, self.wide, size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.ln_q(hidden).view(-1, self.wide))


class Qwen2_5_VisionTransformer(nn.Module):
    """config: of the vision tower. forward: patches [P, C * t * p * p] and grids to features.

    Layers run on patches in the order of windows. Those of fullatt_block_indexes attend within a whole step.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.head_size = config, config.hidden_size // config.num_heads
        self.merge = config.spatial_merge_size
        self.side = config.window_size // self.merge // config.patch_size
        if self.side < 1:
            raise d.Unsupported(
                f"config.vision_config.window_size={config.window_size} is less than a block of {self.merge} patches of"
                f" {config.patch_size} pixels"
            )
        if config.hidden_act not in activations.NAMES:
            known = ", ".join(activations.NAMES)
            raise d.Unsupported(
                f"config.vision_config.hidden_act={config.hidden_act!r} is not supported, only {known}"
            )
        self.whole = frozenset(config.fullatt_block_indexes)
        self.patch_embed = vision.VisionPatchEmbed(
            config.in_channels, config.temporal_patch_size, config.patch_size, config.hidden_size, bias=False
        )
        self.blocks = nn.ModuleList(Qwen2_5_VisionBlock(config) for _ in range(config.depth))
        self.merger = Qwen2_5_VisionPatchMerger(config.out_hidden_size, config.hidden_size, self.merge)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        hidden, unit = self.patch_embed(patches), self.merge**2
        device = hidden.device
        orders, sizes, first = [], [], 0
        for grid in grids:
            own, counts = windows(grid, self.merge, self.side)
            orders.append(own + first)
            sizes += (counts * unit).tolist()
            first += len(own)
        order = torch.from_numpy(np.concatenate(orders)).to(device)
        table = vision.table_of(grids, self.merge, self.head_size, vision.THETA, device)
        hidden, table = (x.unflatten(0, (-1, unit))[order].flatten(0, 1) for x in (hidden, table))
        positions = torch.arange(len(hidden), device=device)
        within = vision.metadata_of(sizes, device)
        whole = vision.metadata_of(vision.steps_of(grids), device)
        for i, block in enumerate(self.blocks):
            with forward_context(whole if i in self.whole else within):
                hidden = block(hidden, positions, table)
        return self.merger(hidden)[order.argsort()]


class Qwen2_5_VLForConditionalGeneration(vision.QwenVL):
    """config: transformers' Qwen2_5_VLConfig. Raises Unsupported."""

    tower_class = Qwen2_5_VisionTransformer
    sizes = ("hidden_size", "out_hidden_size")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rate = config.vision_config.tokens_per_second


ARCH = Architecture(
    names=("Qwen2_5_VLForConditionalGeneration",),
    category="multimodal",
    model="Qwen2_5_VLForConditionalGeneration",
    runner="Generate",
    model_type="qwen2_5_vl",
    media=("image", "video"),
    prefixes={"model.language_model.": "model.", "model.visual.": "visual."},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "Qwen/Qwen2.5-VL-3B-Instruct": {
            "text_config": {
                "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
                "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
            "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
