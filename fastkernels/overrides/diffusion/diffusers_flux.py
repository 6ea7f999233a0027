"""Drop-in blocks of FLUX.1 in diffusers; attention, MLPs, modulations and linear layers stay modules of the block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.diffusers import DiffusersGELU
from fastkernels.overrides.dense_attention.diffusers import DiffusersFluxAttnProcessor
from fastkernels.overrides.diffusion.diffusers import (
    _NOTE,
    DiffusersAdaLayerNormZero,
    DiffusersAdaLayerNormZeroSingle,
)
from fastkernels.overrides.diffusion.gated_residual import gated_residual
from fastkernels.overrides.diffusion.gelu_epilogue import activated
from fastkernels.overrides.diffusion.modulated_pair import modulated_pair
from fastkernels.overrides.diffusion.rope_axes import rope_axes
from fastkernels.overrides.linear.modules import changed, linear_of_two, mlp


class _Attention(nn.Module):
    """The parts of an attention layer that DiffusersFluxAttnProcessor uses, with or without projections of text."""

    fused_projections = False

    def __init__(self, dim: int, heads: int, head_dim: int, eps: float, text: bool):
        super().__init__()
        inner = dim  # the host's `out_dim`
        self.head_dim, self.heads = head_dim, inner // head_dim
        self.added_kv_proj_dim = dim if text else None
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=eps) for _ in range(2))
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, inner) for _ in range(3))
        if text:
            self.to_out = nn.ModuleList([nn.Linear(inner, dim), nn.Dropout(0.0)])
            self.norm_added_q, self.norm_added_k = (nn.RMSNorm(head_dim, eps=eps) for _ in range(2))
            self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(dim, inner) for _ in range(3))
            self.to_add_out = nn.Linear(inner, dim)
        self.processor = DiffusersFluxAttnProcessor()

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return self.processor(self, hidden_states, **kwargs)


class _FeedForward(nn.Module):
    """An MLP with a GELU, named like the host's."""

    def __init__(self, dim: int, ratio: float = 4.0):
        super().__init__()
        inner = int(dim * ratio)
        self.net = nn.Sequential(DiffusersGELU(dim, inner, "tanh"), nn.Dropout(0.0), nn.Linear(inner, dim))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.net(hidden_states)


def _unsupported(norm: Any, residual: torch.Tensor, others: list[torch.Tensor]) -> str | None:
    """Why the op does not compute what the host computes from these, or None."""
    if norm is not None and changed(norm):
        return "other code was put around its norm"
    cls = type(norm)
    # Of tensors of several dtypes, the host's result is of the wider one.
    if norm is not None and nn.LayerNorm not in cls.__mro__[: 1 + hasattr(cls, "fastkernels")]:
        return f"its norm is {cls.__name__}, not LayerNorm"
    if any(t.dtype != residual.dtype for t in others):
        return f"the residual is {residual.dtype}, not all other tensors"
    if any(len(t) != len(residual) for t in others):
        return f"the residual is of {len(residual)} images, not all other tensors"
    return None


def _gated(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, norm: Any = None,
    modulation: tuple[torch.Tensor, ...] = (), front: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """y = residual + gate * x and norm(y) * (1 + scale) + shift; gate, and the modulation's scale and shift: [B, H].

    front: tokens of the residual before those in `residual`, or None.
    """
    others = [x, gate, *modulation]
    reason = _unsupported(norm, residual, others)
    if reason is not None:
        gated_residual.note(reason)
        residual = residual if front is None else torch.cat((front, residual), dim=1)
        y = residual + gate[:, None] * x
        if norm is None:
            return y, y
        scale, shift = modulation
        return y, norm(y) * (1 + scale[:, None]) + shift[:, None]
    affine = (None,) * 4 if norm is None else (*modulation, norm.weight, norm.bias)
    return gated_residual(residual, x, gate, *affine, 1e-6 if norm is None else norm.eps, front)


def _clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


class DiffusersFluxTransformerBlock(nn.Module):
    """diffusers' FluxTransformerBlock: hidden_states [B, S, C] (image), encoder_hidden_states [B, St, C], temb [B, C].

    Returns new encoder_hidden_states and hidden_states. The gated residual after attention runs together with the
    modulated norm behind it.
    """

    def __init__(
        self,
        dim: int,
        num_attention_heads: int,
        attention_head_dim: int,
        qk_norm: str = "rms_norm",
        eps: float = 1e-6,
    ):
        super().__init__()
        self.norm1 = DiffusersAdaLayerNormZero(dim)
        self.norm1_context = DiffusersAdaLayerNormZero(dim)
        self.attn = _Attention(dim, num_attention_heads, attention_head_dim, eps, text=True)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ff = _FeedForward(dim)
        self.norm2_context = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ff_context = _FeedForward(dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate, shift, scale, gate_mlp = self.norm1(hidden_states, emb=temb)
        text, c_gate, c_shift, c_scale, c_gate_mlp = self.norm1_context(encoder_hidden_states, emb=temb)
        found, c_found, *adapters = self.attn(
            hidden_states=x,
            encoder_hidden_states=text,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image, x = _gated(hidden_states, found, gate, self.norm2, (scale, shift))
        image = sum(adapters, _gated(image, mlp(self.ff, x), gate_mlp)[0])  # and of images (IP-Adapter)
        text, x = _gated(encoder_hidden_states, c_found, c_gate, self.norm2_context, (c_scale, c_shift))
        return _clipped(_gated(text, self.ff_context(x), c_gate_mlp)[0]), image


class DiffusersFluxSingleTransformerBlock(nn.Module):
    """diffusers' FluxSingleTransformerBlock, attention and MLP in parallel: takes and returns what a block of two does.

    A GELU with tanh is the epilogue of the MLP's product. The projection of both results is two products, and text and
    image are read where they are: nothing is concatenated.
    """

    def __init__(self, dim: int, num_attention_heads: int, attention_head_dim: int, mlp_ratio: float = 4.0):
        super().__init__()
        self.mlp_hidden_dim = int(dim * mlp_ratio)
        self.norm = DiffusersAdaLayerNormZeroSingle(dim)
        self.proj_mlp = nn.Linear(dim, self.mlp_hidden_dim)
        self.act_mlp = nn.GELU(approximate="tanh")
        self.proj_out = nn.Linear(dim + self.mlp_hidden_dim, dim)
        self.attn = _Attention(dim, num_attention_heads, attention_head_dim, 1e-6, text=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        texts = encoder_hidden_states.shape[1]
        front, residual, x, gate = modulated_pair(self.norm, encoder_hidden_states, hidden_states, temb)
        hidden = activated(self.proj_mlp, self.act_mlp, x)
        found = self.attn(
            hidden_states=x, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {})
        )
        found = linear_of_two(self.proj_out, found, hidden)
        both = _clipped(_gated(residual, found, gate, front=front)[0])
        return both[:, :texts], both[:, texts:]


class DiffusersFluxPosEmbed(nn.Module):
    """diffusers' FluxPosEmbed: ids [S, A] to cosines and sines [S, sum(axes_dim)]."""

    def __init__(self, theta: int, axes_dim: list[int]):
        super().__init__()
        self.theta = theta
        self.axes_dim = axes_dim

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why the op does not compute these positions, or None."""
        return None if isinstance(module.theta, int) else f"theta is {module.theta!r}, not a whole number"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return rope_axes(ids, self.axes_dim, self.theta)  # type: ignore[return-value]  # the host's annotation


_FLUX = "diffusers.models.transformers.transformer_flux:"

TARGETS = {
    "rope_axes": (
        Target(
            "diffusers", f"{_FLUX}FluxPosEmbed", "DiffusersFluxPosEmbed", "leaf", default=False, note=_NOTE, tried=True
        ),
    ),
    "gated_residual": tuple(
        Target(
            "diffusers", f"{_FLUX}{name}", f"Diffusers{name}", "module", default=False, note=_NOTE, tried=True,
            compiled=True,  # 1.10 and 1.05 times as fast as the compiled blocks, 1024 px, bfloat16
        )
        for name in ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    ),
}  # fmt: skip
