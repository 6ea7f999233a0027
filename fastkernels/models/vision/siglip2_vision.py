"""SigLIP 2's vision tower (Tschannen et al., arXiv 2502.14786), for images of any aspect ratio.

The interface is that of dinov3.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.forward_context import get_forward_context
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers.encoder import attend_from_one, attend_within, size_of
from fastkernels.models.vision.dinov3 import Grids
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmReplicatedLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.vllm import VllmLayerNorm

Replicated = partial(VllmReplicatedLinear, return_bias=False)


class Siglip2VisionEmbeddings(nn.Module):
    """Patches plus position embeddings, which are resized to each image's grid."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        p, hidden = size_of(config, "patch_size"), config.hidden_size
        self.side = int(config.num_patches**0.5)
        if self.side**2 != config.num_patches:
            raise Unsupported(f"config.num_patches={config.num_patches} is not a square number")
        self.patch_embedding = Replicated(config.num_channels * p * p, hidden)
        self.position_embedding = nn.Embedding(config.num_patches, hidden)

    def forward(self, patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        hidden = self.patch_embedding(patches.to(self.patch_embedding.weight.dtype))
        resized = {grid: self._positions(grid) for grid in set(grids)}
        return hidden + torch.cat([resized[grid] for grid in grids])

    def _positions(self, grid: tuple[int, int]) -> torch.Tensor:
        """[rows * columns, H]. On the CPU, antialiasing exists in float32 only."""
        weight = self.position_embedding.weight
        table = weight.float() if weight.device.type == "cpu" else weight
        table = table.T.reshape(1, -1, self.side, self.side)
        resized = F.interpolate(table, size=grid, mode="bilinear", align_corners=False, antialias=True)
        return resized[0].flatten(1).T.to(weight.dtype)


class Siglip2Attention(nn.Module):
    """Self-attention within each image: hidden [T, H] to the same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.head_size = hidden // heads
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "num_attention_heads")
        self.qkv_proj = VllmQKVParallelLinear(hidden, self.head_size, heads, return_bias=False)
        self.out_proj = VllmRowParallelLinear(hidden, hidden, return_bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(-1, 3, self.num_heads, self.head_size)
        return self.out_proj(attend_within(qkv).flatten(1))


class Siglip2MLP(nn.Module):
    """Up projection, activation, down projection."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = VllmColumnParallelLinear(config.hidden_size, config.intermediate_size, return_bias=False)
        self.activation_fn = activation_modules.named(config.hidden_act)
        self.fc2 = VllmRowParallelLinear(config.intermediate_size, config.hidden_size, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class Siglip2EncoderLayer(nn.Module):
    """One layer with pre-normalization."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer_norm1 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = Siglip2Attention(config)
        self.layer_norm2 = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = Siglip2MLP(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        return hidden + self.mlp(self.layer_norm2(hidden))


class Siglip2Encoder(nn.Module):
    """The layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Siglip2EncoderLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class ProbeAttention(nn.Module):
    """Attention of one learned query to all tokens of an image, with torch.nn.MultiheadAttention's parameters."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.num_heads = config.hidden_size, config.num_attention_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * hidden))
        self.out_proj = Replicated(hidden, hidden)

    def forward(self, probe: torch.Tensor, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """probe [1, H]; hidden [T, H] of B images. Returns [B, H]."""
        size = hidden.shape[1]
        q = linear(probe, self.in_proj_weight[:size], self.in_proj_bias[:size])
        kv = linear(hidden, self.in_proj_weight[size:], self.in_proj_bias[size:])
        k, v = kv.view(len(hidden), 2, self.num_heads, -1).unbind(1)
        return self.out_proj(attend_from_one(q.view(1, self.num_heads, -1), k, v, starts))


class Siglip2MultiheadAttentionPoolingHead(nn.Module):
    """Attention pooling and an MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.attention = ProbeAttention(config)
        self.layernorm = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = Siglip2MLP(config)

    def forward(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        pooled = self.attention(self.probe[0], hidden, starts)
        return pooled + self.mlp(self.layernorm(pooled))


def mean(hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The mean of each image's tokens [B, H]."""
    lengths = starts.diff()
    if len(lengths) * get_forward_context().max_seqlen_q == len(hidden):  # all of one size
        return hidden.view(len(lengths), -1, hidden.shape[1]).mean(1, dtype=torch.float32).to(hidden.dtype)
    numbers = torch.arange(len(lengths), device=hidden.device)
    rows = torch.repeat_interleave(numbers, lengths, output_size=len(hidden))  # else it waits for the device
    total = hidden.new_zeros(len(lengths), hidden.shape[1], dtype=torch.float32)
    return (total.index_add_(0, rows, hidden.float()) / lengths[:, None]).to(hidden.dtype)


class Siglip2VisionModel(nn.Module):
    """config: transformers.Siglip2VisionConfig. Raises Unsupported."""

    num_labels = 0
    prefix_tokens = 0
    embeddings_class: type[nn.Module] = Siglip2VisionEmbeddings

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise Unsupported(
                f"config.hidden_size={config.hidden_size} is not a multiple of"
                f" num_attention_heads={config.num_attention_heads}"
            )
        self.config = config
        self.embeddings = self.embeddings_class(config)
        self.encoder = Siglip2Encoder(config)
        self.post_layernorm = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)
        has_head = getattr(config, "vision_use_head", True)
        self.head = Siglip2MultiheadAttentionPoolingHead(config) if has_head else None

    def forward(self, patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        return self.post_layernorm(self.encoder(self.embeddings(patches, grids)))

    def pool(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The pooling head's vector of each image; their mean in a checkpoint without one."""
        return mean(hidden, starts) if self.head is None else self.head(hidden, starts)


ARCH = Architecture(
    names=("Siglip2VisionModel",),
    category="vision",
    model="Siglip2VisionModel",
    runner="Encode",
    model_type="siglip2_vision_model",
    inputs="images",
    renamed={"vision_model.": ""},
)
