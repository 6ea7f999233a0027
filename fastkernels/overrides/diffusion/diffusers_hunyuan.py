"""Drop-in parts of HunyuanVideo-1.5 in diffusers; attention, MLPs and modulations stay modules of the block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.diffusers import DiffusersHunyuanVideo15AttnProcessor2_0
from fastkernels.overrides.diffusion.diffusers import _NOTE, DiffusersAdaLayerNormZero
from fastkernels.overrides.diffusion.diffusers_flux import _Attention, _FeedForward, _gated
from fastkernels.overrides.diffusion.rope_axes import rope_axes
from fastkernels.overrides.linear.modules import mlp


class DiffusersHunyuanVideo15TransformerBlock(nn.Module):
    """diffusers' HunyuanVideo15TransformerBlock: hidden_states [B, S, C] (video), encoder_hidden_states [B, St, C].

    temb: [B, C]; attention_mask: [B, St] of the text; freqs_cis: cosines and sines [S, head_dim]. Returns both. The
    gated residual after attention runs together with the modulated norm behind it.
    """

    def __init__(
        self, num_attention_heads: int, attention_head_dim: int, mlp_ratio: float, qk_norm: str = "rms_norm"
    ) -> None:
        super().__init__()
        if qk_norm != "rms_norm":
            raise ValueError(f"qk_norm {qk_norm!r} is not supported: only 'rms_norm'")
        size = num_attention_heads * attention_head_dim
        self.norm1 = DiffusersAdaLayerNormZero(size)
        self.norm1_context = DiffusersAdaLayerNormZero(size)
        self.attn = _Attention(size, num_attention_heads, attention_head_dim, 1e-6, text=True)
        self.attn.processor = DiffusersHunyuanVideo15AttnProcessor2_0()  # type: ignore[assignment]
        self.norm2 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.ff = _FeedForward(size, mlp_ratio)
        self.norm2_context = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.ff_context = _FeedForward(size, mlp_ratio)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate, shift, scale, gate_mlp = self.norm1(hidden_states, emb=temb)
        text, c_gate, c_shift, c_scale, c_gate_mlp = self.norm1_context(encoder_hidden_states, emb=temb)
        found, c_found = self.attn(
            hidden_states=x, encoder_hidden_states=text, attention_mask=attention_mask, image_rotary_emb=freqs_cis
        )  # fmt: skip
        video, x = _gated(hidden_states, found, gate, self.norm2, (scale, shift))
        video = _gated(video, mlp(self.ff, x), gate_mlp)[0]
        text, x = _gated(encoder_hidden_states, c_found, c_gate, self.norm2_context, (c_scale, c_shift))
        return video, _gated(text, mlp(self.ff_context, x), c_gate_mlp)[0]


class DiffusersHunyuanVideo15RotaryPosEmbed(nn.Module):
    """diffusers' HunyuanVideo15RotaryPosEmbed: hidden_states [B, C, F, H, W] to cosines and sines [S, head_dim]."""

    def __init__(self, patch_size: int, patch_size_t: int, rope_dim: list[int], theta: float = 256.0) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patch_size_t = patch_size_t
        self.rope_dim = rope_dim
        self.theta = theta

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why the op does not compute these positions, or None."""
        return None if float(module.theta).is_integer() else f"theta is {module.theta!r}, not a whole number"

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        sizes = hidden_states.shape[2:]
        counts = [n // p for n, p in zip(sizes, (self.patch_size_t, *[self.patch_size] * 2), strict=True)]
        axes = [torch.arange(n, device=hidden_states.device, dtype=torch.float32) for n in counts]
        at = torch.cartesian_prod(*axes)
        return rope_axes(at, list(self.rope_dim), int(self.theta))  # type: ignore[return-value]


_HUNYUAN = "diffusers.models.transformers.transformer_hunyuan_video15:"


def _target(name: str, seam: str) -> Target:
    path = f"{_HUNYUAN}HunyuanVideo15{name}"
    cls = f"DiffusersHunyuanVideo15{name}"
    return Target("diffusers", path, cls, seam, default=False, note=_NOTE, tried=True)


TARGETS = {
    "rope_axes": (_target("RotaryPosEmbed", "leaf"),),
    "gated_residual": (_target("TransformerBlock", "module"),),
}
