"""Qwen3-VL (arXiv 2511.21631): Qwen3 that also reads features of inner layers of its vision tower (deepstack)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.forward_context import forward_context
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions import towers
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers import qwen_vision as vision
from fastkernels.models.common.layers.media import Grid
from fastkernels.overrides.activation.vllm import VllmGELU
from fastkernels.overrides.linear.vllm import VllmColumnParallelLinear, VllmRowParallelLinear
from fastkernels.overrides.norm.vllm import VllmLayerNorm

EPS = 1e-6


def describe(config: Any) -> d.Decoder:
    bias, norm = config.attention_bias, d.Norm(eps=config.rms_norm_eps)
    made = d.llama(config, bias=bias, out_bias=bias, head_norm=norm)
    return replace(made, tower=tuple(tower(config.vision_config)))


def tower(own: Any) -> Iterator[towers.Part]:
    """The modules of the vision tower with this config."""
    hidden, positions = own.hidden_size, (own.num_position_embeddings, own.hidden_size)
    wide = hidden * own.spatial_merge_size**2
    yield towers.patch_embed("visual.patch_embed.proj", own, hidden, bias=True)
    yield towers.Part("visual.pos_embed", "interpolate", {"weight": positions})
    names = "linear_fc1", "act_fn", "linear_fc2"
    yield from towers.blocks("visual.blocks", own, hidden, own.intermediate_size, names)
    inner = [f"visual.deepstack_merger_list.{i}" for i in range(len(own.deepstack_visual_indexes))]
    for path in ("visual.merger", *inner):
        yield towers.layer_norm(f"{path}.norm", wide if path in inner else hidden)
        yield towers.linear(f"{path}.linear_fc1", wide, wide, "columns")
        yield towers.activation(f"{path}.act_fn", "gelu")
        yield towers.linear(f"{path}.linear_fc2", own.out_hidden_size, wide, "rows")


class Qwen3VisionMLP(nn.Module):
    """Up projection, activation, down projection."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.linear_fc1 = VllmColumnParallelLinear(size, inner, return_bias=False)
        self.act_fn = activation_modules.named(config.hidden_act)
        self.linear_fc2 = VllmRowParallelLinear(inner, size, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.act_fn(self.linear_fc1(x)))


class Qwen3VisionBlock(vision.VisionBlock):
    """One layer of the vision tower."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm1 = VllmLayerNorm(config.hidden_size, EPS)
        self.attn = vision.VisionAttention(config.hidden_size, config.num_heads)
        self.norm2 = VllmLayerNorm(config.hidden_size, EPS)
        self.mlp = Qwen3VisionMLP(config)


class Qwen3VisionPatchMerger(nn.Module):
    """Patches [P, H] to features [P / merge^2, size]. inner: of a layer within, whose norm is that of a block."""

    def __init__(self, config: Any, inner: bool = False) -> None:
        super().__init__()
        self.wide = config.hidden_size * config.spatial_merge_size**2
        self.size = self.wide if inner else config.hidden_size
        self.norm = VllmLayerNorm(self.size, EPS)
        self.linear_fc1 = VllmColumnParallelLinear(self.wide, self.wide, return_bias=False)
        self.act_fn = VllmGELU()
        self.linear_fc2 = VllmRowParallelLinear(self.wide, config.out_hidden_size, return_bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden.view(-1, self.size)).view(-1, self.wide)
        return self.linear_fc2(self.act_fn(self.linear_fc1(x)))


class Qwen3VisionTransformer(nn.Module):
    """config: of the vision tower. forward: patches [P, C * t * p * p] and grids to features [F, n * size].

    The first `size` channels are the last layer's, the others those of layers within.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.head_size = config, config.hidden_size // config.num_heads
        self.side = int(config.num_position_embeddings**0.5)
        if self.side**2 != config.num_position_embeddings:
            raise d.Unsupported(
                f"config.vision_config.num_position_embeddings={config.num_position_embeddings} is not a square number"
            )
        self.inner = sorted(config.deepstack_visual_indexes)
        if self.inner != list(config.deepstack_visual_indexes) or not all(
            0 <= i < config.depth for i in self.inner
        ):
            raise d.Unsupported(
                f"config.vision_config.deepstack_visual_indexes={config.deepstack_visual_indexes!r} is not supported,"
                f" only increasing numbers of its {config.depth} layers"
            )
        self.patch_embed = vision.VisionPatchEmbed(
            config.in_channels, config.temporal_patch_size, config.patch_size, config.hidden_size, bias=True
        )
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Qwen3VisionBlock(config) for _ in range(config.depth))
        self.merger = Qwen3VisionPatchMerger(config)
        self.deepstack_merger_list = nn.ModuleList(Qwen3VisionPatchMerger(config, True) for _ in self.inner)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        hidden = self.patch_embed(patches)
        hidden = hidden + self._learned_positions(grids).to(hidden.dtype)
        positions = torch.arange(len(hidden), device=hidden.device)
        merge = self.config.spatial_merge_size
        table = vision.table_of(grids, merge, self.head_size, vision.THETA, hidden.device)
        found: list[torch.Tensor] = []
        with forward_context(vision.metadata_of(vision.steps_of(grids), hidden.device)):
            for i, block in enumerate(self.blocks):
                hidden = block(hidden, positions, table)
                if i in self.inner:
                    found.append(self.deepstack_merger_list[len(found)](hidden))
        return torch.cat([self.merger(hidden), *found], dim=-1)

    def _learned_positions(self, grids: Sequence[Grid]) -> torch.Tensor:
        """[P, H] float32: the square table, resized to each grid and in the order of the patches."""
        weight, merge = self.pos_embed.weight, self.config.spatial_merge_size
        square = weight.float().T.reshape(1, -1, self.side, self.side)
        resized: dict[tuple[int, int], torch.Tensor] = {}
        for _, rows, columns in grids:
            if (rows, columns) not in resized:
                made = F.interpolate(square, (rows, columns), mode="bilinear", align_corners=True)[0]
                places = vision.blocks_first(rows, columns, merge) @ [columns, 1]
                resized[rows, columns] = made.flatten(1).T[torch.from_numpy(places).to(weight.device)]
        return torch.cat([resized[rows, columns].repeat(steps, 1) for steps, rows, columns in grids])


class Qwen3VLForConditionalGeneration(vision.QwenVL):
    """config: transformers' Qwen3VLConfig. Raises Unsupported."""

    tower_class = Qwen3VisionTransformer
    sizes = ("hidden_size", "out_hidden_size")
    timestamps = True


ARCH = Architecture(
    names=("Qwen3VLForConditionalGeneration",),
    category="multimodal",
    model="Qwen3VLForConditionalGeneration",
    runner="Generate",
    model_type="qwen3_vl",
    media=("image", "video"),
    renamed={"model.language_model.": "model.", "model.visual.": "visual."},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "Qwen/Qwen3-VL-2B-Instruct": {
            "text_config": {
                "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048,
                "deepstack_visual_indexes": [5, 11, 17],
            },
            "tie_word_embeddings": True,
        },
        "Qwen/Qwen3-VL-8B-Instruct": {
            "text_config": {
                "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
                },
            },
            "vision_config": {"depth": 27, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
        },
    },
)  # fmt: skip
