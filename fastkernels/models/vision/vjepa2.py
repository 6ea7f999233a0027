"""V-JEPA 2's encoder (Assran et al., arXiv 2506.09985): features and classes of videos and images.

The interface is that of dinov3.py, for videos. The predictor, which fills in masked parts for training, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers.encoder import attend_from_one, attend_within, size_of
from fastkernels.models.vision.siglip2_vision import Replicated, mean
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmMergedColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.vllm import VllmLayerNorm
from fastkernels.overrides.rope.rope_nd import rope_nd

Clips = Sequence[tuple[int, int, int]]
Table = tuple[torch.Tensor, torch.Tensor]


@cache  # CUDA graphs read the tables
def rope_table(steps: int, side: int, head_size: int, device: torch.device) -> Table:
    """Cosines and sines [steps * side * side, head_size] in float32 of a clip's tokens.

    A third of the channels each turns by time, row and column; what is left over is not rotated. Channels 2j and
    2j + 1 are a pair, but the angles repeat by halves of a third, as in the model's training.
    """
    size = head_size // 3 // 2 * 2
    omega = 10000.0 ** -(torch.arange(size // 2, dtype=torch.float32, device=device) / max(size // 2, 1))
    axes = [torch.arange(n, device=device) for n in (steps, side, side)]
    at = torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=1)
    angles = (at[..., None] * omega).repeat(1, 1, 2).flatten(1)
    angles = torch.cat((angles, angles.new_zeros(len(at), head_size - angles.shape[1])), dim=1)
    return angles.cos(), angles.sin()


class PatchEmbedding3D(nn.Module):
    """The convolution of non-overlapping patches of videos as a linear layer: [P, C * t * p * p] to [P, H]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        p, t = size_of(config, "patch_size"), size_of(config, "tubelet_size")
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.in_chans, t, p, p))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class VJEPA2PatchEmbeddings3D(nn.Module):
    """The projection of patches."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.proj = PatchEmbedding3D(config)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.proj(patches)


class VJEPA2Embeddings(nn.Module):
    """Patches; positions are in the attention layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch_embeddings = VJEPA2PatchEmbeddings3D(config)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.patch_embeddings(patches)


class VJEPA2RopeAttention(nn.Module):
    """Self-attention within each clip: hidden [T, H] to the same; table: see rope_table."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "num_attention_heads")
        self.qkv = VllmMergedColumnParallelLinear(
            hidden, [hidden] * 3, bias=config.qkv_bias, return_bias=False
        )
        self.proj = VllmRowParallelLinear(hidden, hidden, return_bias=False)

    def forward(self, hidden: torch.Tensor, table: Table) -> torch.Tensor:
        qkv = self.qkv(hidden).view(len(hidden), 3, self.num_heads, -1)
        q, k = (rope_nd(qkv[None, :, i], *table, False)[0] for i in (0, 1))
        return self.proj(attend_within(torch.stack((q, k, qkv[:, 2]), dim=1)).flatten(1))


class VJEPA2MLP(nn.Module):
    """Up projection, activation, down projection."""

    def __init__(self, config: Any, ratio: float = 4.0) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, int(config.hidden_size * ratio)
        self.fc1 = VllmColumnParallelLinear(hidden, inner, return_bias=False)
        self.activation = activation_modules.named(config.hidden_act)
        self.fc2 = VllmRowParallelLinear(inner, hidden, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class VJEPA2Layer(nn.Module):
    """One layer with pre-normalization."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm1 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = VJEPA2RopeAttention(config)
        self.norm2 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = VJEPA2MLP(config, config.mlp_ratio)

    def forward(self, hidden: torch.Tensor, table: Table) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden), table)
        return hidden + self.mlp(self.norm2(hidden))


class VJEPA2Encoder(nn.Module):
    """The layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.embeddings = VJEPA2Embeddings(config)
        self.layer = nn.ModuleList(VJEPA2Layer(config) for _ in range(config.num_hidden_layers))
        self.layernorm = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, patches: torch.Tensor, grids: Clips) -> torch.Tensor:
        hidden = self.embeddings(patches)
        each = [rope_table(steps, side, self.head_size, hidden.device) for steps, side, _ in grids]
        table = torch.cat([cos for cos, _ in each]), torch.cat([sin for _, sin in each])
        for layer in self.layer:
            hidden = layer(hidden, table)
        return self.layernorm(hidden)


class VJEPA2PoolerSelfAttention(nn.Module):
    """Self-attention within each clip, without positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "num_attention_heads")
        self.qkv_proj = VllmQKVParallelLinear(hidden, hidden // heads, heads, return_bias=False)
        self.out_proj = VllmRowParallelLinear(hidden, hidden, return_bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(len(hidden), 3, self.num_heads, -1)
        return self.out_proj(attend_within(qkv).flatten(1))


class VJEPA2PoolerCrossAttention(nn.Module):
    """Attention of one learned query to all tokens of a clip, without an output projection."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, hidden = config.num_attention_heads, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (Replicated(hidden, hidden) for _ in range(3))

    def forward(self, query: torch.Tensor, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        parts = self.q_proj(query), self.k_proj(hidden), self.v_proj(hidden)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in parts)
        return attend_from_one(q, k, v, starts)


class VJEPA2PoolerSelfAttentionLayer(nn.Module):
    """One layer with pre-normalization."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer_norm1 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = VJEPA2PoolerSelfAttention(config)
        self.layer_norm2 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = VJEPA2MLP(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        return hidden + self.mlp(self.layer_norm2(hidden))


class VJEPA2PoolerCrossAttentionLayer(nn.Module):
    """Clips to vectors: query [1, H], hidden [T, H] of B clips; returns [B, H]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer_norm1 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.cross_attn = VJEPA2PoolerCrossAttention(config)
        self.layer_norm2 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = VJEPA2MLP(config)

    def forward(self, query: torch.Tensor, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        pooled = query + self.cross_attn(query, self.layer_norm1(hidden), starts)
        return pooled + self.mlp(self.layer_norm2(pooled))


class VJEPA2AttentivePooler(nn.Module):
    """Self-attention layers, then attention pooling."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.query_tokens = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.cross_attention_layer = VJEPA2PoolerCrossAttentionLayer(config)
        self.self_attention_layers = nn.ModuleList(
            VJEPA2PoolerSelfAttentionLayer(config) for _ in range(config.num_pooler_layers)
        )

    def forward(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        for layer in self.self_attention_layers:
            hidden = layer(hidden)
        return self.cross_attention_layer(self.query_tokens[0], hidden, starts)


class VJEPA2Model(nn.Module):
    """config: transformers.VJEPA2Config. Raises Unsupported.

    A video's vector is the attentive pooler's in a checkpoint with a classifier, otherwise the mean of its tokens.
    """

    prefix_tokens = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads = config.num_attention_heads
        if config.hidden_size % (2 * heads):
            raise Unsupported(
                f"config.hidden_size={config.hidden_size} is not a multiple of two times num_attention_heads={heads}"
            )
        self.config = config
        self.side = size_of(config, "crop_size") // size_of(config, "patch_size")
        self.encoder = VJEPA2Encoder(config)
        classifies = config.architectures[0].endswith("ForVideoClassification")
        self.num_labels = config.num_labels if classifies else 0
        if self.num_labels:
            self.pooler = VJEPA2AttentivePooler(config)
            self.classifier = Replicated(config.hidden_size, self.num_labels)

    def check_grid(self, grid: tuple[int, int, int]) -> None:
        """Raise ValueError for frames of another number of patches."""
        if grid[1:] != (self.side, self.side):
            p = self.config.patch_size
            raise ValueError(
                f"the prompt has frames of {grid[2] * p} x {grid[1] * p} pixels after the video processor, and this"
                f" model takes {self.side * p} x {self.side * p}: set `crop_size` in video_preprocessor_config.json"
            )

    def forward(self, patches: torch.Tensor, grids: Clips) -> torch.Tensor:
        return self.encoder(patches, grids)

    def pool(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.pooler(hidden, starts) if self.num_labels else mean(hidden, starts)

    def classify(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(hidden, starts))


ARCH = Architecture(
    names=("VJEPA2Model", "VJEPA2ForVideoClassification"),
    category="vision",
    model="VJEPA2Model",
    runner="Encode",
    model_type="vjepa2",
    inputs="videos",
    packed={"qkv": ("query", "key", "value"), "qkv_proj": ("q_proj", "k_proj", "v_proj")},
    renamed={"vjepa2.": ""},
    unused=("predictor.*",),
)
