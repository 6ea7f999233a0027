"""Swin Transformer V2 (Liu et al., arXiv 2111.09883): features and classes of images, with attention within windows.

The interface is that of dinov3.py, with fewer hidden states than patches: a stage merges four tokens into one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers.encoder import size_of
from fastkernels.models.vision.dinov3 import Grids, PatchEmbedding
from fastkernels.models.vision.siglip2_vision import Replicated, mean
from fastkernels.overrides.dense_attention.windows import attend_in_windows
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.vllm import VllmLayerNorm

# Added to the scores of tokens that only the shift made neighbors. transformers adds its -100 twice.
HIDDEN = -200.0


def absent(config: Any) -> list[str]:
    """Patterns of the biases that a checkpoint leaves out: the keys have none, and the model adds zeros there."""
    return ["*.attention.self.key.bias"] if config.qkv_bias else []


def merged(grid: tuple[int, int]) -> tuple[int, int]:
    """The grid after a stage. An odd side is padded."""
    return -(-grid[0] // 2), -(-grid[1] // 2)


class Swinv2PatchEmbeddings(nn.Module):
    """The projection of patches [P, C * p * p] to [P, embed_dim]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.projection = PatchEmbedding(config, config.embed_dim)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.projection(patches)


class Swinv2Embeddings(nn.Module):
    """Patches, normalized. There are no position embeddings: windows have a position bias."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch_embeddings = Swinv2PatchEmbeddings(config)
        self.norm = VllmLayerNorm(config.embed_dim, 1e-5)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.norm(self.patch_embeddings(patches))


class Swinv2SelfAttention(nn.Module):
    """Cosine attention within windows: x [W, N, C], mask [windows of an image, N, N] or None; returns [W, N, C]."""

    def __init__(self, config: Any, dim: int, heads: int, window: int, pretrained: int) -> None:
        super().__init__()
        self.window, self.pretrained = window, pretrained
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "num_heads")
        self.qkv_proj = VllmQKVParallelLinear(
            dim, dim // heads, heads, bias=config.qkv_bias, return_bias=False
        )
        self.logit_scale = nn.Parameter(torch.empty(heads, 1, 1))
        self.continuous_position_bias_mlp = nn.Sequential(
            Replicated(2, 512), nn.ReLU(), Replicated(512, heads, bias=False)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        own = slice(parallel.get_tp_rank() * self.num_heads, (parallel.get_tp_rank() + 1) * self.num_heads)
        return attend_in_windows((q, k, v), self.logit_scale[own], self._bias(x.device)[own], mask)

    def _bias(self, device: torch.device) -> torch.Tensor:
        """Position bias of all heads [heads, N, N]: an MLP of the logarithm of two tokens' distance."""
        side = self.window
        steps = torch.arange(1 - side, side, device=device, dtype=torch.float32)
        steps = steps * 8 / max((self.pretrained or side) - 1, 1)
        steps = steps.sign() * torch.log2(steps.abs() + 1) / 3
        table = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), dim=-1).flatten(0, 1)
        rows = self.continuous_position_bias_mlp(table.to(self.logit_scale.dtype))
        y, x = torch.meshgrid(*[torch.arange(side, device=device)] * 2, indexing="ij")
        y, x = (t.flatten()[:, None] - t.flatten() + side - 1 for t in (y, x))
        return 16 * rows[y * (2 * side - 1) + x].permute(2, 0, 1).sigmoid()


class Swinv2Dense(nn.Module):
    """The linear layer behind attention, or the MLP's second."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.dense = VllmRowParallelLinear(size, out, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)


class Swinv2Attention(nn.Module):
    """Window attention and its output projection."""

    def __init__(self, config: Any, dim: int, heads: int, window: int, pretrained: int) -> None:
        super().__init__()
        self.self = Swinv2SelfAttention(config, dim, heads, window, pretrained)
        self.output = Swinv2Dense(dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.output(self.self(x, mask))


class Swinv2Intermediate(nn.Module):
    """The MLP's first linear layer and its activation."""

    def __init__(self, config: Any, dim: int) -> None:
        super().__init__()
        self.dense = VllmColumnParallelLinear(dim, int(config.mlp_ratio * dim), return_bias=False)
        self.intermediate_act_fn = activation_modules.named(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(self.dense(x))


class Swinv2Layer(nn.Module):
    """One layer with post-normalization: x [B, rows, columns, C] to the same.

    shift  tokens by which windows are moved, 0 in every other layer
    """

    def __init__(self, config: Any, dim: int, heads: int, window: int, shift: int, pretrained: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.attention = Swinv2Attention(config, dim, heads, window, pretrained)
        self.layernorm_before = VllmLayerNorm(dim, config.layer_norm_eps)
        self.intermediate = Swinv2Intermediate(config, dim)
        self.output = Swinv2Dense(int(config.mlp_ratio * dim), dim)
        self.layernorm_after = VllmLayerNorm(dim, config.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layernorm_before(self._attend(x))
        return x + self.layernorm_after(self.output(self.intermediate(x)))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -columns % self.window, 0, -rows % self.window))
        if self.shift:
            x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        windows = self._windows(x)
        mask = self._mask(x.shape[1], x.shape[2], x.device) if self.shift else None
        found = self.attention(windows.flatten(0, 2).flatten(1, 2), mask)
        found = found.view(windows.shape).transpose(2, 3).reshape(x.shape)
        if self.shift:
            found = found.roll((self.shift, self.shift), dims=(1, 2))
        return found[:, :rows, :columns]

    def _windows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, rows, columns, C] to [B, rows / w, columns / w, w, w, C]."""
        w = self.window
        return x.unflatten(2, (-1, w)).unflatten(1, (-1, w)).transpose(2, 3)

    def _mask(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """[windows, N, N]: HIDDEN between tokens of two of the nine regions that the shift brings together."""
        region = [
            (at >= size - self.window).long() + (at >= size - self.shift)
            for size in (rows, columns) for at in [torch.arange(size, device=device)]
        ]  # fmt: skip
        regions = self._windows((region[0][:, None] * 3 + region[1])[None, ..., None]).reshape(
            -1, self.window**2
        )
        return HIDDEN * (regions[:, None] != regions[..., None])


class Swinv2PatchMerging(nn.Module):
    """Four neighbors to one token: [B, rows, columns, C] to [B, rows / 2, columns / 2, 2 C], padded by zeros."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduction = Replicated(4 * dim, 2 * dim, bias=False)
        self.norm = VllmLayerNorm(2 * dim, 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.norm(self.reduction(torch.cat(parts, dim=-1)))


class Swinv2Stage(nn.Module):
    """Layers of one width, and the merging behind them in all stages but the last."""

    def __init__(self, config: Any, stage: int, side: int) -> None:
        super().__init__()
        dim = config.embed_dim * 2**stage
        window = min(side, config.window_size)
        shift = 0 if side <= window else config.window_size // 2
        sizes = dim, config.num_heads[stage], window
        pretrained = config.pretrained_window_sizes[stage]
        self.blocks = nn.ModuleList(
            Swinv2Layer(config, *sizes, shift * (i % 2), pretrained) for i in range(config.depths[stage])
        )
        self.downsample = Swinv2PatchMerging(dim) if stage < len(config.depths) - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class Swinv2Encoder(nn.Module):
    """The stages."""

    def __init__(self, config: Any, side: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Swinv2Stage(config, i, side // 2**i) for i in range(len(config.depths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Swinv2Model(nn.Module):
    """config: transformers.Swinv2Config. An image's vector is the mean of its tokens. Raises Unsupported."""

    prefix_tokens = 0
    pads_images = True  # to whole patches

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.embeddings = Swinv2Embeddings(config)
        self.encoder = Swinv2Encoder(config, size_of(config, "image_size") // size_of(config, "patch_size"))
        dim = config.embed_dim * 2 ** (len(config.depths) - 1)
        self.layernorm = VllmLayerNorm(dim, config.layer_norm_eps)
        classifies = config.architectures[0].endswith("ForImageClassification")
        self.num_labels = config.num_labels if classifies else 0
        if self.num_labels:
            self.classifier = Replicated(dim, self.num_labels)

    def features(self, grid: tuple[int, int]) -> int:
        """The number of hidden states of an image with that grid of patches."""
        for _ in self.config.depths[1:]:
            grid = merged(grid)
        return grid[0] * grid[1]

    def forward(self, patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        """Images of one grid are computed as a batch."""
        images = self.embeddings(patches).split([rows * columns for rows, columns in grids])
        found: dict[int, torch.Tensor] = {}
        for grid in set(grids):
            same = [i for i, other in enumerate(grids) if other == grid]
            hidden = self.encoder(torch.stack([images[i] for i in same]).unflatten(1, grid))
            found.update(zip(same, self.layernorm(hidden).flatten(1, 2), strict=True))
        return torch.cat([found[i] for i in range(len(grids))])

    def pool(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return mean(hidden, starts)

    def classify(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.classifier(mean(hidden, starts))


def _check(config: Any) -> None:
    if config.use_absolute_embeddings:
        raise Unsupported("config.use_absolute_embeddings=True is not supported, only False")
    stages = len(config.depths)
    for name in ("num_heads", "pretrained_window_sizes"):
        if len(getattr(config, name)) < stages:
            raise Unsupported(
                f"config.{name}={getattr(config, name)!r} has fewer than {stages} entries, one a stage"
            )
    for i, heads in enumerate(config.num_heads[:stages]):
        dim = config.embed_dim * 2**i
        if heads < 1 or dim % heads:
            raise Unsupported(
                f"config.num_heads={config.num_heads!r}: {dim} channels are no multiple of {heads} heads"
            )
    side = size_of(config, "image_size") // size_of(config, "patch_size") // 2 ** (stages - 1)
    if side < 1 or size_of(config, "window_size") < 1:
        raise Unsupported(f"config.image_size={config.image_size} leaves no token after {stages} stages")


ARCH = Architecture(
    names=("Swinv2Model", "Swinv2ForImageClassification"),
    category="vision",
    model="Swinv2Model",
    runner="Encode",
    model_type="swinv2",
    inputs="images",
    packed={"qkv_proj": ("query", "key", "value")},
    renamed={"swinv2.": ""},
    absent="fastkernels.models.vision.swinv2:absent",
    unused=("embeddings.mask_token", "*.relative_coords_table", "*.relative_position_index"),
    sizes={"num_attention_heads": "", "num_heads": ""},
)
