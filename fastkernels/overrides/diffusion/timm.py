"""Drop-in blocks of timm's vision transformers; attention, MLP, norms and dropout stay modules of the block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.block.timm import TimmGluMlp, TimmSwiGLU
from fastkernels.overrides.dense_attention.timm import TimmAttentionRope, TimmEvaAttention
from fastkernels.overrides.diffusion.timm_defaults import Attention, LayerNorm, Mlp
from fastkernels.overrides.diffusion.timm_residuals import add_both
from fastkernels.overrides.linear.modules import changed


class _LayerScale(nn.Module):
    """Holds one factor for each channel, named like the host's."""

    def __init__(self, dim: int, init_values: float, dd: dict[str, Any]):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init_values, **dd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


def _scale(module: Any) -> tuple[torch.Tensor | None, tuple[Any, ...]]:
    """The factors of a LayerScale, or None and the module, if it is another one."""
    plain = type(module).__name__ in ("LayerScale", "_LayerScale") and not changed(module)
    return (module.gamma, ()) if plain else (None, (module,))


class TimmBlock(nn.Module):
    """timm.models.vision_transformer.Block: x [B, N, dim] to the same; attn_mask broadcasts to [B, heads, N, N].

    LayerScale and the residual after attention run together with the norm behind them.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_attn_norm: bool = False,
        scale_mlp_norm: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        act_layer: Any = nn.GELU,
        norm_layer: Any = LayerNorm,
        mlp_layer: Any = Mlp,
        attn_layer: Any = Attention,
        depth: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if drop_path or attn_layer not in (Attention, "", "attn"):
            raise ValueError("TimmBlock: drop_path and other attention layers are only supported live")
        dd = {"device": device, "dtype": dtype}
        self.norm1, self.norm2 = (norm_layer(dim, **dd) for _ in range(2))
        self.attn = Attention(
            dim, num_heads=num_heads, qkv_bias=qkv_bias, qk_norm=qk_norm, scale_norm=scale_attn_norm,
            proj_bias=proj_bias, attn_drop=attn_drop, proj_drop=proj_drop, norm_layer=norm_layer, **dd,
        )  # fmt: skip
        self.ls1, self.ls2 = (
            _LayerScale(dim, init_values, dd) if init_values else nn.Identity() for _ in range(2)
        )
        self.drop_path1, self.drop_path2 = nn.Identity(), nn.Identity()
        self.mlp = mlp_layer(
            in_features=dim, hidden_features=int(dim * mlp_ratio), act_layer=act_layer,
            norm_layer=norm_layer if scale_mlp_norm else None, bias=proj_bias, drop=proj_drop, **dd,
        )  # fmt: skip

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this block (ours or the host's), or None."""
        scales = (m for m in (module.ls1, module.ls2) if _scale(m)[1] and not isinstance(m, nn.Identity))
        return next((f"its scale is {type(m).__name__}, not LayerScale" for m in scales), None)

    def forward(
        self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        (gamma_1, first), (gamma_2, second) = _scale(self.ls1), _scale(self.ls2)
        between = (*first, self.drop_path1), (*second, self.drop_path2)
        options = {"attn_mask": attn_mask, "is_causal": is_causal}
        return add_both(self, x, (gamma_1, gamma_2), between, options)


class TimmEvaBlock(nn.Module):
    """timm.models.eva.EvaBlock, also of DINOv3: as TimmBlock, with rotary positions."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        qkv_fused: bool = True,
        mlp_ratio: float = 4.0,
        swiglu_mlp: bool = False,
        swiglu_align_to: int = 0,
        scale_mlp: bool = False,
        scale_attn_inner: bool = False,
        num_prefix_tokens: int = 1,
        attn_type: str = "eva",
        rotate_half: bool = False,
        gated_attn: bool = False,
        qk_norm: bool = False,
        num_kv_heads: int | None = None,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        init_values: float | None = None,
        attn_only_layer_scale: bool = False,
        act_layer: Any = nn.GELU,
        norm_layer: Any = LayerNorm,
        attn_head_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ):
        super().__init__()
        if drop_path:
            raise ValueError("TimmEvaBlock: drop_path is only supported live")
        dd = {"device": device, "dtype": dtype}
        self.norm1, self.norm2 = (norm_layer(dim, **dd) for _ in range(2))
        rope = attn_type == "rope"
        cls: Any = TimmAttentionRope if rope else TimmEvaAttention
        self.attn = cls(
            dim, num_heads=num_heads, qkv_bias=qkv_bias, qkv_fused=qkv_fused, num_prefix_tokens=num_prefix_tokens,
            attn_drop=attn_drop, proj_drop=proj_drop, attn_head_dim=attn_head_dim, norm_layer=norm_layer,
            qk_norm=qk_norm, scale_norm=scale_attn_inner, rotate_half=rotate_half, gated=gated_attn,
            **({"num_kv_heads": num_kv_heads} if rope else {}), **dd,
        )  # fmt: skip
        scaled = (init_values is not None, init_values is not None and not attn_only_layer_scale)
        self.gamma_1, self.gamma_2 = (
            nn.Parameter(torch.full((dim,), init_values or 0.0, **dd)) if has else None for has in scaled
        )
        self.drop_path1, self.drop_path2 = nn.Identity(), nn.Identity()
        hidden = int(dim * mlp_ratio)
        norm = norm_layer if scale_mlp else None
        if swiglu_mlp and (scale_mlp or swiglu_align_to):
            self.mlp: Any = TimmSwiGLU(
                dim, hidden, norm_layer=norm, drop=proj_drop, align_to=swiglu_align_to, **dd
            )
        elif swiglu_mlp:
            self.mlp = TimmGluMlp(
                dim, hidden * 2, norm_layer=norm, act_layer=nn.SiLU, gate_last=False, drop=proj_drop, **dd
            )
        else:
            self.mlp = Mlp(dim, hidden, act_layer=act_layer, norm_layer=norm, drop=proj_drop, **dd)

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        between = (self.drop_path1,), (self.drop_path2,)
        options = {"rope": rope, "attn_mask": attn_mask, "is_causal": is_causal}
        return add_both(self, x, (self.gamma_1, self.gamma_2), between, options)


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"

TARGETS = {
    "gated_residual": tuple(
        Target("timm", f"timm.models.{path}", f"Timm{path.partition(':')[2]}", "module", default=False, note=_NOTE,
               tried=True, compiled=True)
        for path in ("vision_transformer:Block", "eva:EvaBlock")
    ),
}  # fmt: skip
