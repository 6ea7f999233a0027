"""What decoder layers of one shape share: norm, attention, norm, MLP, with the residual beside the hidden states.

The functions take the layer's parts from it by name, so that they serve a live host's layer as well as ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.block.gated_mlp import SGLangLlamaMLP, VllmLlamaMLP
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.sglang import SGLangRMSNorm
from fastkernels.overrides.norm.vllm import VllmRMSNorm


def unsupported_norm(norm: Any) -> str | None:
    """None if a norm's attributes say all that it does: weight, variance_epsilon and SGLang's order of rounding."""
    if not type(norm).__name__.endswith("RMSNorm") and "RMSNorm_" not in type(norm).__name__:
        return f"a norm is {type(norm).__name__}, not RMSNorm"
    for name, off in (
        ("variance_size_override", None), ("fp32_residual", False), ("override_orig_dtype", None),
        ("x_pad_to_multiple", 0), ("has_weight", True),
    ):  # fmt: skip
        if getattr(norm, name, off) != off:
            return f"a norm has {name}={getattr(norm, name)!r}"
    return None


def apply_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Normalize x + residual (None: x); residual becomes the sum."""
    # SGLang's norms carry a flag; vLLM's round once in compiled code, and before the product with the weight in eager.
    cast_first = getattr(norm, "cast_x_before_out_mul", not torch.compiler.is_compiling())
    return rms_norm(x, norm.weight, norm.variance_epsilon, residual, None, cast_first)


def run_layer(
    layer: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states, residual) behind the layer; inputs: what its self_attn takes beside the hidden states.

    The memory of the residual, or of hidden_states where that is None, is overwritten with the sum.
    """
    hidden = apply_norm(layer.input_layernorm, hidden_states, residual)
    residual = hidden_states if residual is None else residual
    hidden = layer.self_attn(hidden_states=hidden, **inputs)
    hidden = apply_norm(layer.post_attention_layernorm, hidden, residual)
    return layer.mlp(hidden), residual


def check_causal(config: Any) -> None:
    if not getattr(config, "is_causal", True):
        raise ValueError("config.is_causal=False (bidirectional attention) is not supported")


class DecoderLayer(nn.Module):
    """What the hosts' layers share. hidden_states, residual: [T, H]; residual is None in the first layer."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """None if our forward serves this module (ours or the host's), else the reason."""
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
            if not hasattr(module, name):
                return f"it has no {name}"
        return unsupported_norm(module.input_layernorm) or unsupported_norm(module.post_attention_layernorm)


class VllmDecoderLayer(DecoderLayer):
    """vLLM's; the residual's memory is overwritten with the sum."""

    def _build_around(self, attention: nn.Module, config: Any, quant_config: Any, prefix: str) -> None:
        self.hidden_size = config.hidden_size
        self.self_attn = attention
        self.mlp = VllmLlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config=quant_config,
            bias=getattr(config, "mlp_bias", False), prefix=f"{prefix}.mlp",
        )  # fmt: skip
        self.input_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return run_layer(self, hidden_states, residual, positions=positions)


class SGLangDecoderLayer(DecoderLayer):
    """SGLang's; their forwards differ by version."""

    def _build_around(self, attention: nn.Module, config: Any, quant_config: Any, prefix: str) -> None:
        self.hidden_size = config.hidden_size
        self.self_attn = attention
        self.mlp = SGLangLlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config, f"{prefix}.mlp"
        )
        self.input_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def run_on_stream(
    layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any, capture_output: Any
) -> torch.Tensor:
    """SGLang from 0.5.23 on: hidden_states [T, H] is the residual stream, and so is the result."""
    if capture_output is not None:
        raise ValueError("capture_output needs SGLang's own layer boundaries")
    inputs = {"positions": positions, "forward_batch": forward_batch}
    hidden, stream = run_layer(layer, hidden_states.clone(), None, **inputs)
    return hidden + stream
