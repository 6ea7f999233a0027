"""Drop-in attention for single models of timm: BEiT, Hiera, and the MetaFormers with attention (CaFormer)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.attention_dense import attend
from fastkernels.overrides.dense_attention.timm import only_hosts
from fastkernels.overrides.linear.modules import product


class TimmMetaFormerAttention(nn.Module):
    """timm.models.metaformer.Attention: x [B, N, dim] to the same."""

    needs_host = staticmethod(only_hosts)

    def __init__(
        self,
        dim: int,
        head_dim: int = 32,
        num_heads: int | None = None,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        proj_bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.fused_attn = True
        self.num_heads = num_heads or max(dim // head_dim, 1)
        self.attention_dim = self.num_heads * head_dim
        self.qkv = nn.Linear(dim, self.attention_dim * 3, bias=qkv_bias, **dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(self.attention_dim, dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = product(self.qkv, x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        found = attend(q, k, v, self.scale, None, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(product(self.proj, found))


class TimmMaskUnitAttention(nn.Module):
    """timm.models.hiera.MaskUnitAttention: x [B, N, dim] to [B, N / q_stride, dim_out], in mask units or over all.

    The tokens of a unit are N / units apart, as the host's Unroll leaves them; q_stride of them share a query, their
    maximum. Ours makes each unit a sequence. The host's attention of 5 dimensions has no fused kernel.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        heads: int,
        q_stride: int = 1,
        window_size: int = 0,
        use_mask_unit_attn: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.dim, self.dim_out, self.heads, self.q_stride = dim, dim_out, heads, q_stride
        self.head_dim = dim_out // heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = True
        self.qkv = nn.Linear(dim, 3 * dim_out, **dd)
        self.proj = nn.Linear(dim_out, dim_out, **dd)
        self.window_size, self.use_mask_unit_attn = window_size, use_mask_unit_attn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        units = x.shape[1] // (self.q_stride * self.window_size) if self.use_mask_unit_attn else 1
        qkv = product(self.qkv, x).unflatten(1, (-1, units)).transpose(1, 2).flatten(0, 1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B * units, N / units, H, D]
        if self.q_stride > 1:
            q = q.unflatten(1, (self.q_stride, -1)).amax(dim=1)
        found = attend(q, k, v, self.scale).unflatten(0, (-1, units))  # [B, units, tokens, H * D]
        return product(self.proj, found.transpose(1, 2).flatten(1, 2).contiguous())


class TimmBeitAttention(nn.Module):
    """timm.models.beit.Attention: x [B, N, dim] to the same, with a bias for each pair of positions of a window.

    shared_rel_pos_bias: [heads, N, N], added to the layer's own [1, heads, N, N]. The window's class token comes first.
    """

    needs_host = staticmethod(only_hosts)

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qkv_bias_separate: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        window_size: tuple[int, int] | None = None,
        attn_head_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        size = dim // num_heads if attn_head_dim is None else attn_head_dim
        inner = size * num_heads
        self.scale = size**-0.5
        self.fused_attn = True
        self.qkv_bias_separate = qkv_bias_separate
        self.qkv = nn.Linear(dim, inner * 3, bias=False, **dd)
        self.q_bias: Any = None
        self.k_bias: Any = None
        self.v_bias: Any = None
        if qkv_bias:
            del self.k_bias
            self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(inner, **dd)) for _ in range(2))
            self.register_buffer("k_bias", torch.zeros(inner, **dd), persistent=False)
        self.window_size, self.relative_position_bias_table = window_size, None
        self.relative_position_index: Any = None
        if window_size:
            height, width = window_size
            rows = (2 * height - 1) * (2 * width - 1) + 3
            self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, num_heads, **dd))
            del self.relative_position_index
            self.register_buffer(
                "relative_position_index", _pairs(height, width).to(device), persistent=False
            )
        else:
            self.window_size = None
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(inner, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor, shared_rel_pos_bias: torch.Tensor | None = None) -> torch.Tensor:
        bias = None if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
        if bias is None or self.qkv_bias_separate:
            qkv = self.qkv(x) if bias is None else self.qkv(x) + bias
        else:
            qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        table, added = self.relative_position_bias_table, shared_rel_pos_bias
        if table is not None:
            index = self.relative_position_index
            own = table[index.flatten()].view(*index.shape, -1).permute(2, 0, 1).contiguous()[None]
            added = own if added is None else own + added
        found = attend(q, k, v, self.scale, added, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(product(self.proj, found))


def _pairs(height: int, width: int) -> torch.Tensor:
    """The row [N, N] of the bias of each pair of tokens of a window. The class token comes first, its rows last."""
    y, x = (t.flatten() for t in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    inner = (y[:, None] - y + height - 1) * (2 * width - 1) + x[:, None] - x + width - 1
    last = (2 * height - 1) * (2 * width - 1) + 2
    index = F.pad(inner, (1, 0, 1, 0), value=last)
    index[0, 1:], index[1:, 0] = last - 2, last - 1
    return index


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(path: str, cls: str) -> Target:
    return Target(
        "timm", f"timm.models.{path}", cls, "module", default=False, note=_NOTE, tried=True, compiled=True
    )


TARGETS = {
    "attention_dense": (
        _target("beit:Attention", "TimmBeitAttention"),
        _target("hiera:MaskUnitAttention", "TimmMaskUnitAttention"),
        _target("metaformer:Attention", "TimmMetaFormerAttention"),
    )
}
