"""Forward passes of decoder layers: norm, attention, norm, MLP, with a separate residual.

The functions find the parts of a layer by name, so they serve a live host's layers as well as ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.norm.rms_norm import rms_norm

# The classes of norms that `apply_norm` computes: the hosts', which a live patch derives from, and ours. Other classes
# called RMSNorm compute something else: Cohere's passes the residual through, flash-linear-attention's has a gate.
NORMS = {
    "vllm.model_executor.layers.layernorm:RMSNorm", "sglang.srt.layers.layernorm:RMSNorm",
    "fastkernels.overrides.norm.vllm:VllmRMSNorm", "fastkernels.overrides.norm.sglang:SGLangRMSNorm",
    "fastkernels.overrides.norm.sglang:SGLangRMSNorm_0_5_16",
}  # fmt: skip


def unsupported_norm(norm: Any) -> str | None:
    """Return why `apply_norm` does not compute this norm, or None."""
    kind = type(norm)
    if (path := f"{kind.__module__}:{kind.__qualname__}") not in NORMS:
        return f"a norm is {path}, not the RMSNorm of vLLM's or SGLang's layers"
    for name, off in (
        ("variance_size_override", None), ("fp32_residual", False), ("override_orig_dtype", None),
        ("x_pad_to_multiple", 0), ("has_weight", True),
    ):  # fmt: skip
        if getattr(norm, name, off) != off:
            return f"a norm has {name}={getattr(norm, name)!r}"
    return None


def apply_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the norm of x + residual, and store the sum in residual; without a residual, return the norm of x.

    A norm of our engine with `sums_ranks` gets the part of a rank; its function `norm_of_sum` sums it first.
    """
    if getattr(norm, "sums_ranks", False):
        return norm.norm_of_sum(norm, x, residual)
    # SGLang's norms have a flag. vLLM's round once in compiled code; in eager code also before the weight is applied.
    cast_first = getattr(norm, "cast_x_before_out_mul", not torch.compiler.is_compiling())
    return rms_norm(x, norm.weight, norm.variance_epsilon, residual, None, cast_first)


def run_layer(
    layer: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (hidden states, residual) after the layer; inputs: other arguments of its self_attn.

    The sum overwrites the memory of residual, or of hidden_states if residual is None.
    """
    hidden = apply_norm(layer.input_layernorm, hidden_states, residual)
    residual = hidden_states if residual is None else residual
    hidden = layer.self_attn(hidden_states=hidden, **inputs)
    hidden = apply_norm(layer.post_attention_layernorm, hidden, residual)
    return layer.mlp(hidden), residual


def check_causal(config: Any) -> None:
    """Raise ValueError for a config with bidirectional attention."""
    if not getattr(config, "is_causal", True):
        raise ValueError("config.is_causal=False (bidirectional attention) is not supported")


def attention_bias(config: Any) -> bool:
    """Return whether the attention projections of a Llama config have biases."""
    return getattr(config, "attention_bias", False) or getattr(config, "bias", False)


class DecoderLayer(nn.Module):
    """Base of the hosts' dense layers. hidden_states, residual: [T, H]; residual is None in the first layer."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
            if not hasattr(module, name):
                return f"it has no {name}"
        return unsupported_norm(module.input_layernorm) or unsupported_norm(module.post_attention_layernorm)


class SparseDecoderLayer(nn.Module):
    """Base of the hosts' Mixtral layers. hidden_states, residual: [T, H]; residual is None in the first layer.

    The sum overwrites the residual's memory.
    """

    self_attn: nn.Module
    block_sparse_moe: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def _run(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs: other arguments of self_attn."""
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states=hidden_states, **inputs)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.block_sparse_moe(hidden_states), residual
