"""Forward pass of a decoder layer, with the host's norm where no kernel supports a call."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.dispatch import Unsupported  # type: ignore[attr-defined]  # of fork.py
from fastkernels.overrides.norm.rms_norm import rms_norm


def apply_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the norm of x + residual, and store the sum in residual; without a residual, return the norm of x."""
    # SGLang's norms have a flag. vLLM's round once in compiled code; in eager code also before the weight is applied.
    cast_first = getattr(norm, "cast_x_before_out_mul", not torch.compiler.is_compiling())
    try:
        return rms_norm(x, norm.weight, norm.variance_epsilon, residual, None, cast_first)
    except Unsupported:
        if residual is None:
            return norm(x)
        out, total = norm(x, residual)
        residual.copy_(total)
        return out


def run_layer(
    layer: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (hidden states, residual) after the layer; inputs: other arguments of its self_attn."""
    hidden = apply_norm(layer.input_layernorm, hidden_states, residual)
    residual = hidden_states if residual is None else residual
    hidden = layer.self_attn(hidden_states=hidden, **inputs)
    hidden = apply_norm(layer.post_attention_layernorm, hidden, residual)
    return layer.mlp(hidden), residual


class DecoderLayer:
    @staticmethod
    def supports(layer: Any) -> str | None:
        """Return why `run_layer` does not compute this layer, None if it does."""
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            plain = type(norm).__name__.removeprefix("Vllm") == "RMSNorm" and norm.has_weight
            if not plain or norm.variance_size_override is not None:
                return f"a norm is {norm}"
        return None
