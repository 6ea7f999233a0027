"""Qwen's models with a vision tower, and parts of the towers: patches in blocks, rotary positions, attention, merger.

Patches come in blocks of merge x merge, which become one feature: first the blocks of a row of blocks, step after step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers.decoder import Decoder
from fastkernels.models.common.layers.encoder import attend_within, size_of
from fastkernels.models.common.layers.media import Grid, grid_offsets
from fastkernels.overrides.activation.vllm import VllmGELU
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.rope.rotary_emb import rotary_emb

THETA = 1e4  # of the positions in a grid


def blocks_first(rows: int, columns: int, merge: int) -> np.ndarray:
    """(row, column) of the patches of one step, [rows * columns, 2], in the order of blocks."""
    at = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge)
    return at.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


@lru_cache(maxsize=64)
def rope_table(
    rows: int, columns: int, merge: int, head_size: int, theta: float, device: torch.device
) -> torch.Tensor:
    """Cosines, then sines, of the patches of one step: [rows * columns, head_size] float32.

    The first half of the angles is that of the row, the second that of the column.
    """
    pairs = torch.arange(0, head_size // 2, 2, dtype=torch.float32, device=device) / (head_size // 2)
    at = torch.from_numpy(blocks_first(rows, columns, merge)).to(device)
    angles = (at[:, :, None].float() * (1.0 / theta**pairs)).flatten(1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def table_of(
    grids: Sequence[Grid], merge: int, head_size: int, theta: float, device: torch.device
) -> torch.Tensor:
    """rope_table of all patches of media, step after step."""
    found = (rope_table(rows, columns, merge, head_size, theta, device) for _, rows, columns in grids)
    return torch.cat([table.repeat(grid[0], 1) for table, grid in zip(found, grids, strict=True)])


def metadata_of(lengths: Sequence[int], device: torch.device) -> AttentionMetadata:
    """The metadata of attention within sequences of these lengths, for the forward context."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    cu_seqlens, longest = torch.from_numpy(starts).to(device), max(lengths)
    return AttentionMetadata(
        slot_mapping=cu_seqlens.new_empty(0, dtype=torch.int64), cu_seqlens_q=cu_seqlens, seq_lens=cu_seqlens.diff(),
        block_table=cu_seqlens.new_empty(len(lengths), 0), max_seqlen_q=longest, max_seqlen_k=longest, padded=False,
    )  # fmt: skip


def steps_of(grids: Sequence[Grid]) -> list[int]:
    """The number of patches of each step: patches attend to those of the same step."""
    return [rows * columns for steps, rows, columns in grids for _ in range(steps)]


class VisionPatchEmbed(nn.Module):
    """The convolution of patches without overlap: patches [P, C * t * p * p] to [P, H]."""

    proj: Any

    def __init__(self, channels: int, steps: int, patch: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Module()
        self.proj.weight = nn.Parameter(torch.empty(hidden, channels, steps, patch, patch))
        self.proj.bias = nn.Parameter(torch.empty(hidden)) if bias else None

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight
        return linear(patches.to(weight.dtype), weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Self-attention within the sequences of the forward context: hidden [T, H] to the same; table: see table_of."""

    def __init__(self, hidden: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "num_heads of the vision tower")
        self.qkv = VllmQKVParallelLinear(hidden, self.head_size, heads, bias=bias, return_bias=False)
        self.proj = VllmRowParallelLinear(hidden, hidden, bias=bias, return_bias=False)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(hidden).view(-1, 3, self.num_heads, self.head_size)
        rotary_emb(positions, qkv[:, 0], qkv[:, 1], self.head_size, table, True, False)
        return self.proj(attend_within(qkv).flatten(1))


class VisionBlock(nn.Module):
    """One layer with pre-normalization; subclasses make norm1, attn, norm2 and mlp."""

    norm1: nn.Module
    attn: VisionAttention
    norm2: nn.Module
    mlp: nn.Module

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), positions, table)
        return hidden + self.mlp(self.norm2(hidden))


class TwoLinears(nn.Module):
    """linear, GELU, linear, which Qwen's mergers name mlp.0 and mlp.2."""

    def __init__(self, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        own = {
            "0": VllmColumnParallelLinear(*sizes[:2], return_bias=False), "1": VllmGELU(),
            "2": VllmRowParallelLinear(*sizes[1:], return_bias=False),
        }  # fmt: skip
        for name, module in own.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


class QwenVL(Decoder):
    """A language model with a vision tower; see media.py for its interface.

    tower_class  built from the tower's config: patches [P, C * t * p * p] and grids to features
    sizes        fields of that config: channels of a patch's hidden state, and of a feature
    rate         positions of a second of video; 0: each step of a video is one position
    """

    placeholders: Mapping[str, str] = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    timestamps = False
    rate: float = 0
    tower_class: type[nn.Module]
    sizes: tuple[str, str]

    def __init__(self, config: Any) -> None:
        own = config.vision_config
        hidden, features = self.sizes
        for name in ("patch_size", "temporal_patch_size", "spatial_merge_size", "num_heads", "depth", hidden):
            size_of(own, name)
        if getattr(own, hidden) % (4 * own.num_heads):
            raise Unsupported(
                f"config.vision_config.{hidden}={getattr(own, hidden)} is not a multiple of four times"
                f" num_heads={own.num_heads}: two axes of positions need pairs of channels"
            )
        rope = getattr(own, "rope_parameters", None) or {}
        if (
            rope.get("rope_type", "axial") not in ("axial", "default")
            or rope.get("rope_theta", THETA) != THETA
        ):
            raise Unsupported(
                f"config.vision_config.rope_parameters={rope!r} is not supported, only theta {THETA:g}"
            )
        if getattr(own, features) != config.hidden_size:
            raise Unsupported(
                f"config.vision_config.{features}={getattr(own, features)} is not the text model's"
                f" hidden_size={config.hidden_size}"
            )
        super().__init__(config)
        self.token_ids = {"image": config.image_token_id, "video": config.video_token_id}
        self.merge = own.spatial_merge_size
        self.patch_channels = own.in_channels * own.temporal_patch_size * own.patch_size**2
        self.visual = self.tower_class(own)

    def merged(self, grid: Grid) -> Grid:
        """The grid of features. Raises ValueError for one that cannot be divided into blocks."""
        steps, rows, columns = grid
        if rows % self.merge or columns % self.merge or not prod(grid):
            raise ValueError(
                f"a grid of {steps} x {rows} x {columns} patches has no blocks of {self.merge} x {self.merge}"
            )
        return steps, rows // self.merge, columns // self.merge

    def offsets(self, grid: Grid, seconds: float | None = None) -> np.ndarray:
        """Positions [3, n] of the features of a grid, from that of the first one. See media.py."""
        return grid_offsets(grid, self.rate * seconds if self.rate and seconds else 1.0)

    def encode(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Features of media [sum of merged grids, n * H]."""
        return self.visual(patches, grids)
