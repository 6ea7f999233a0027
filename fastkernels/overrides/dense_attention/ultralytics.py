"""Drop-in attention of ultralytics' detectors: all cells of an image, or of a part of it, attend to each other.

Written from the published module interfaces and equations. ultralytics is under the AGPL and is never imported here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.ultralytics import UltralyticsConv
from fastkernels.overrides.dense_attention.attention_dense import attention_dense


def _mix(heads: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """heads: [B, N, H, 2 * keys + D]. Returns the attention of its parts, and the values, [B, N, H * D]."""
    size = heads.shape[-1] - 2 * keys
    q, k, v = heads.split((keys, keys, size), -1)
    if (
        keys != size
    ):  # zeros add nothing to the products, and the first columns of wider results are all there is
        wide = max(keys, size)
        q, k, v = (F.pad(t, (0, wide - t.shape[-1])) for t in (q, k, v))
    mixed = attention_dense(q.contiguous(), k.contiguous(), v.contiguous(), keys**-0.5)
    return mixed[..., :size].flatten(2), v[..., :size].flatten(2)


def _image(tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Tokens [B, rows * columns, C] as an image [B, C, rows, columns]."""
    return tokens.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)


class UltralyticsAttention(nn.Module):
    """ultralytics.nn.modules.block.Attention: x [B, dim, H, W] to the same.

    attn_ratio: the share of a head's channels that keys have
    """

    format = None

    def __init__(self, dim: int, num_heads: int = 8, attn_ratio: float = 0.5):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.key_dim = int(self.head_dim * attn_ratio)
        self.scale = self.key_dim**-0.5
        self.qkv = UltralyticsConv(dim, dim + 2 * self.key_dim * num_heads, 1, act=False)
        self.proj = UltralyticsConv(dim, dim, 1, act=False)
        self.pe = UltralyticsConv(dim, dim, 3, 1, g=dim, act=False)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if abs(module.scale * module.key_dim**0.5 - 1) > 1e-6:
            return f"its scale is {module.scale}, not key_dim ** -0.5"
        return None

    def forward(self, x):
        rows, columns = x.shape[2:]
        heads = self.qkv(x).flatten(2).transpose(1, 2).unflatten(2, (self.num_heads, -1))
        mixed, values = (_image(t, rows, columns) for t in _mix(heads, self.key_dim))
        return self.proj(mixed + self.pe(values))


class UltralyticsAAttn(nn.Module):
    """ultralytics.nn.modules.block.AAttn: x [B, dim, H, W] to the same; cells of each of `area` parts attend."""

    def __init__(self, dim: int, num_heads: int, area: int = 1):
        super().__init__()
        self.area, self.num_heads = area, num_heads
        self.head_dim = dim // num_heads
        self.all_head_dim = width = self.head_dim * num_heads
        self.qkv = UltralyticsConv(dim, 3 * width, 1, act=False)
        self.proj = UltralyticsConv(width, dim, 1, act=False)
        self.pe = UltralyticsConv(width, width, 7, 1, 3, g=width, act=False)

    def forward(self, x):
        batch, _, rows, columns = x.shape
        tokens = self.qkv(x).flatten(2).transpose(1, 2)
        heads = tokens.reshape(batch * self.area, -1, self.num_heads, 3 * self.head_dim)
        mixed, values = (
            _image(t.reshape(batch, rows * columns, -1), rows, columns) for t in _mix(heads, self.head_dim)
        )
        return self.proj(mixed + self.pe(values))


def _target(name: str) -> Target:
    note = "decided at first calls on a GPU, elsewhere replaced on request"
    path = f"ultralytics.nn.modules.block:{name}"
    return Target("ultralytics", path, f"Ultralytics{name}", "module", default=False, note=note, tried=True)


TARGETS = {"attention_dense": tuple(map(_target, ("Attention", "AAttn")))}
