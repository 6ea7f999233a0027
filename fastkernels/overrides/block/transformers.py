"""The gated MLP of transformers' Llama and of the models that copy it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.block.gated_mlp import check_activation


class TransformersLlamaMLP(nn.Module):
    """transformers.models.llama.modeling_llama.LlamaMLP and its like: gate_proj, up_proj, down_proj are nn.Linear.

    config: hidden_size, intermediate_size, hidden_act (silu) and, if there, mlp_bias. x [..., H] to [..., H].
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        check_activation(config.hidden_act)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self.act_fn = nn.SiLU()

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        for name in ("gate_proj", "up_proj", "down_proj"):
            child = getattr(module, name, None)
            if type(child) is not nn.Linear:
                return f"{name} is {type(child).__name__}, not nn.Linear"
            if "forward" in vars(child) or child._forward_hooks or child._forward_pre_hooks:
                return f"{name} has hooks or a replaced forward"
        act = type(getattr(module, "act_fn", None)).__name__
        return None if act in ("SiLU", "SiLUActivation") else f"act_fn is {act}, not SiLU"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(_side_by_side(x, self.gate_proj, self.up_proj)))


def _side_by_side(x: torch.Tensor, gate: nn.Linear, up: nn.Linear) -> torch.Tensor:
    """Return gate(x) and up(x), concatenated along the last dimension."""
    plain = gate.bias is None and up.bias is None and x.dtype == gate.weight.dtype == up.weight.dtype
    eager = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
    if not plain or not eager or torch.is_autocast_enabled(x.device.type):
        return torch.cat((gate(x), up(x)), dim=-1)
    # Write the products into the halves of one tensor: a concatenation would cost what the fused activation saves.
    # Dynamo cannot trace this, and a compiler avoids the copies of a concatenation itself.
    out = torch.empty((*x.shape[:-1], gate.out_features + up.out_features), dtype=x.dtype, device=x.device)
    rows, halves = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]).split(gate.out_features, dim=-1)
    torch.mm(rows, gate.weight.t(), out=halves[0])
    torch.mm(rows, up.weight.t(), out=halves[1])
    return out


_MODELS = (
    ("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("smollm3", "SmolLM3"),
    ("granite", "Granite"), ("olmo2", "Olmo2"),
)  # fmt: skip

TARGETS = {
    "gated_mlp": tuple(
        Target(
            "transformers",
            f"transformers.models.{model}.modeling_{model}:{prefix}MLP",
            "TransformersLlamaMLP",
            "module",
        )
        for model, prefix in _MODELS
    ),
}
