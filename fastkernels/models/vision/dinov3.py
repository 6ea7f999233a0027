"""DINOv3 vision transformers (Siméoni et al., arXiv 2508.10104): features of images.

Every vision encoder has this interface: model(patches [P, C * p * p], grids) returns hidden states [T, H], image after
image, where grids holds each image's patches as (rows, columns). An image has `prefix_tokens` tokens more than patches;
they come first. pool(hidden, starts [B + 1]) returns one vector for each image, and classify(hidden, starts) the
logits of a model with a classifier. The images' bounds are in fastkernels.core.forward_context too. A model for one
grid only has check_grid(grid), which raises ValueError for others; features(grid) is the number of an image's hidden
states, where that is not the number of its tokens. A model with `pads_images` pads images to whole patches by zeros,
as others cut them. For models of videos (vjepa2.py), patches are [P, C * t * p * p], and grids have a third number,
the steps in time, which comes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers.encoder import attend_within, size_of
from fastkernels.overrides.activation.vllm import VllmGeluAndMul, VllmSiluAndMul
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmMergedColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.vllm import VllmLayerNorm
from fastkernels.overrides.rope.rotary_emb import rotary_emb

Grids = Sequence[tuple[int, int]]
GATES = {"silu": VllmSiluAndMul, "gelu": VllmGeluAndMul}


def absent(config: Any) -> list[str]:
    """Patterns of the biases that a checkpoint leaves out: the model adds zeros there."""
    has = {"q": config.query_bias, "k": config.key_bias, "v": config.value_bias}
    return [f"*.attention.{name}_proj.bias" for name, biased in has.items() if not biased]


class PatchEmbedding(nn.Module):
    """The convolution of non-overlapping patches as a linear layer: patches [P, C * p * p] to [P, H]."""

    def __init__(self, config: Any, size: int | None = None) -> None:
        super().__init__()
        p, size = size_of(config, "patch_size"), size or config.hidden_size
        self.weight = nn.Parameter(torch.empty(size, config.num_channels, p, p))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class DINOv3ViTEmbeddings(nn.Module):
    """The class token, register tokens and patches of each image."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.register_tokens = nn.Parameter(torch.empty(1, config.num_register_tokens, config.hidden_size))
        self.patch_embeddings = PatchEmbedding(config)

    def forward(self, patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        prefix = torch.cat((self.cls_token[0], self.register_tokens[0]))
        parts = self.patch_embeddings(patches).split([rows * columns for rows, columns in grids])
        return torch.cat([tokens for part in parts for tokens in (prefix, part)])


@cache  # CUDA graphs read the tables
def rope_table(
    rows: int, columns: int, prefix: int, head_size: int, theta: float, device: torch.device
) -> torch.Tensor:
    """Cosines, then sines, of one image's tokens [prefix + rows * columns, head_size] in float32.

    A patch's angles are those of its center, as (y, x) in [-1, 1]. Prefix tokens are not rotated.
    """
    frequencies = theta ** -torch.arange(0, 1, 4 / head_size, dtype=torch.float32, device=device)
    y, x = (2 * torch.arange(0.5, n, device=device) / n - 1 for n in (rows, columns))
    centers = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)
    angles = (2 * math.pi * centers[:, :, None] * frequencies).flatten(1)
    angles = torch.cat((angles.new_zeros(prefix, angles.shape[1]), angles))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class DINOv3ViTAttention(nn.Module):
    """Self-attention within each image. hidden [T, H]; table [T, head_size]: see rope_table."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.head_size = hidden // heads
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "num_attention_heads")
        biased = config.query_bias or config.key_bias or config.value_bias
        self.qkv_proj = VllmQKVParallelLinear(hidden, self.head_size, heads, bias=biased, return_bias=False)
        self.o_proj = VllmRowParallelLinear(hidden, hidden, bias=config.proj_bias, return_bias=False)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(-1, 3, self.num_heads, self.head_size)
        rotary_emb(positions, qkv[:, 0], qkv[:, 1], self.head_size, table, True)
        return self.o_proj(attend_within(qkv).flatten(1))


class DINOv3ViTMLP(nn.Module):
    """Two projections, gated or not."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gated = config.use_gated_mlp
        options = {"bias": config.mlp_bias, "return_bias": False}
        if self.gated:
            if config.hidden_act not in GATES:
                raise Unsupported(
                    f"config.hidden_act={config.hidden_act!r} of a gated MLP is not one of {', '.join(GATES)}"
                )
            self.gate_up_proj = VllmMergedColumnParallelLinear(sizes[0], [sizes[1]] * 2, **options)
            self.act_fn = GATES[config.hidden_act]()
        else:
            self.up_proj = VllmColumnParallelLinear(*sizes, **options)
            self.act_fn = activation_modules.named(config.hidden_act)
        self.down_proj = VllmRowParallelLinear(sizes[1], sizes[0], **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.gate_up_proj(x) if self.gated else self.up_proj(x)
        return self.down_proj(self.act_fn(wide))


class LayerScale(nn.Module):
    """A learned scale of each channel of a branch, added to the residual stream."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.empty(size))

    def forward(self, branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(residual, branch, self.lambda1)


class DINOv3ViTLayer(nn.Module):
    """One layer with pre-normalization."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm1 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = DINOv3ViTAttention(config)
        self.layer_scale1 = LayerScale(config.hidden_size)
        self.norm2 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = DINOv3ViTMLP(config)
        self.layer_scale2 = LayerScale(config.hidden_size)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        hidden = self.layer_scale1(self.attention(self.norm1(hidden), positions, table), hidden)
        return self.layer_scale2(self.mlp(self.norm2(hidden)), hidden)


class DINOv3ViTModel(nn.Module):
    """config: transformers.DINOv3ViTConfig. An image's vector is its class token. Raises Unsupported."""

    num_labels = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_size % (4 * config.num_attention_heads):
            raise Unsupported(
                f"config.hidden_size={config.hidden_size} is not a multiple of four times"
                f" num_attention_heads={config.num_attention_heads}: two axes of positions need pairs of channels"
            )
        self.config = config
        self.prefix_tokens = 1 + config.num_register_tokens
        self.embeddings = DINOv3ViTEmbeddings(config)
        self.layer = nn.ModuleList(DINOv3ViTLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        hidden = self.embeddings(patches, grids)
        table = self._table(grids, hidden.device)
        positions = torch.arange(len(hidden), device=hidden.device)
        for layer in self.layer:
            hidden = layer(hidden, positions, table)
        return self.norm(hidden)

    def _table(self, grids: Grids, device: torch.device) -> torch.Tensor:
        config = self.config
        size = config.hidden_size // config.num_attention_heads
        return torch.cat(
            [rope_table(*grid, self.prefix_tokens, size, config.rope_theta, device) for grid in grids]
        )

    def pool(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return hidden.index_select(0, starts[:-1])


ARCH = Architecture(
    names=("DINOv3ViTModel",),
    category="vision",
    model="DINOv3ViTModel",
    runner="Encode",
    model_type="dinov3_vit",
    inputs="images",
    renamed={"layer.": "layer.", "model.layer.": "layer."},
    absent="fastkernels.models.vision.dinov3:absent",
    unused=("embeddings.mask_token",),
)
