"""Drop-in transformer block of diffusers' UNets; attention, MLP and linear layers stay modules of the block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.diffusers import DiffusersAttnProcessor2_0
from fastkernels.overrides.diffusion.diffusers import _NOTE, DiffusersGEGLU
from fastkernels.overrides.diffusion.gated_residual import add_residual, apply_norm
from fastkernels.overrides.linear.modules import mlp


class _Attention(nn.Module):
    """The parts of an attention layer that DiffusersAttnProcessor2_0 uses, with the names of the host's."""

    spatial_norm = group_norm = norm_cross = norm_q = norm_k = None
    residual_connection, rescale_output_factor = False, 1.0

    def __init__(self, dim: int, context: int, heads: int, head_dim: int, bias: bool, out_bias: bool):
        super().__init__()
        inner, self.heads = heads * head_dim, heads
        self.to_q = nn.Linear(dim, inner, bias=bias)
        self.to_k, self.to_v = (nn.Linear(context, inner, bias=bias) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(inner, dim, bias=out_bias), nn.Dropout(0.0)])
        self.processor = DiffusersAttnProcessor2_0()

    def prepare_attention_mask(self, mask: torch.Tensor, length: int, batch: int) -> torch.Tensor:
        """A mask [B, Sq, Sk] as [B * heads, Sq, Sk]."""
        return mask.repeat_interleave(self.heads, dim=0)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.processor(self, hidden_states, **kwargs)


class _FeedForward(nn.Module):
    """An MLP with a GEGLU, with the names of the host's."""

    def __init__(self, dim: int, inner: int, bias: bool):
        super().__init__()
        layers = [DiffusersGEGLU(dim, inner, bias), nn.Dropout(0.0), nn.Linear(inner, dim, bias=bias)]
        self.net = nn.ModuleList(layers)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            hidden_states = layer(hidden_states)
        return hidden_states


class DiffusersBasicTransformerBlock(nn.Module):
    """diffusers' BasicTransformerBlock with layer norms: hidden_states [B, T, C]; encoder_hidden_states [B, S, Cs].

    Each residual sum before a norm runs together with it.
    """

    checks_calls = True

    def __init__(
        self,
        dim: int,
        num_attention_heads: int,
        attention_head_dim: int,
        dropout=0.0,
        cross_attention_dim: int | None = None,
        activation_fn: str = "geglu",
        num_embeds_ada_norm: int | None = None,
        attention_bias: bool = False,
        only_cross_attention: bool = False,
        double_self_attention: bool = False,
        upcast_attention: bool = False,
        norm_elementwise_affine: bool = True,
        norm_type: str = "layer_norm",
        norm_eps: float = 1e-5,
        final_dropout: bool = False,
        attention_type: str = "default",
        positional_embeddings: str | None = None,
        num_positional_embeddings: int | None = None,
        ada_norm_continous_conditioning_embedding_dim: int | None = None,
        ada_norm_bias: int | None = None,
        ff_inner_dim: int | None = None,
        ff_bias: bool = True,
        attention_out_bias: bool = True,
    ):
        super().__init__()
        if norm_type != "layer_norm" or activation_fn != "geglu" or attention_type != "default" or dropout:
            raise ValueError(
                "BasicTransformerBlock: only layer norms, GEGLU and plain attention without dropout are supported"
            )
        if positional_embeddings is not None or upcast_attention:
            raise ValueError("BasicTransformerBlock: positions and upcast attention are not supported")
        sizes = (num_attention_heads, attention_head_dim, attention_bias, attention_out_bias)
        self.norm_type, self.only_cross_attention = norm_type, only_cross_attention
        self.pos_embed = self._chunk_size = None
        self.norm1 = nn.LayerNorm(dim, norm_eps, norm_elementwise_affine)
        context = cross_attention_dim if only_cross_attention else None
        self.attn1 = _Attention(dim, context or dim, *sizes)
        self.norm2 = self.attn2 = None
        if cross_attention_dim is not None or double_self_attention:
            self.norm2 = nn.LayerNorm(dim, norm_eps, norm_elementwise_affine)
            context = None if double_self_attention else cross_attention_dim
            self.attn2 = _Attention(dim, context or dim, *sizes)
        self.norm3 = nn.LayerNorm(dim, norm_eps, norm_elementwise_affine)
        self.ff = _FeedForward(dim, ff_inner_dim or 4 * dim, ff_bias)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this block (ours or the host's) as it is now, or None."""
        if module.norm_type != "layer_norm":
            return f"its norms are {module.norm_type}, not layer_norm"
        if module.pos_embed is not None:
            return "it adds positions"
        return None if module._chunk_size is None else "its MLP runs in chunks"

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        timestep: torch.LongTensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: torch.LongTensor | None = None,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        more = dict(cross_attention_kwargs or {})
        grounded = more.pop("gligen", None)
        text = encoder_hidden_states if self.only_cross_attention else None
        found = self.attn1(
            apply_norm(self.norm1, hidden_states),
            encoder_hidden_states=text,
            attention_mask=attention_mask,
            **more,
        )
        behind: Any = self.norm3 if self.attn2 is None else self.norm2
        if grounded is None:
            hidden_states, x = add_residual(hidden_states, found, None, (), behind)
        else:
            hidden_states = self.fuser(found + hidden_states, grounded["objs"])  # type: ignore[operator]  # the host's
            x = behind(hidden_states)
        if self.attn2 is not None:
            found = self.attn2(
                x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask, **more
            )
            hidden_states, x = add_residual(hidden_states, found, None, (), self.norm3)
        return mlp(self.ff, x) + hidden_states


TARGETS = {
    "gated_residual": (
        Target(
            "diffusers", "diffusers.models.attention:BasicTransformerBlock", "DiffusersBasicTransformerBlock", "module",
            default=False, note=_NOTE, tried=True,
            compiled=True,  # SDXL, 4 steps: 4.3 ms of residual sums and norms, in the compiled host 6.7
        ),
    ),
}  # fmt: skip
