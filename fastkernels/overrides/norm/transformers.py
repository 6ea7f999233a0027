"""Drop-in normalizations for transformers: each model has a class of its own, most with the same code."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.norm.l2_norm import l2_norm
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.t5_layer_norm import t5_layer_norm


class TransformersLlamaRMSNorm(nn.Module):
    """LlamaRMSNorm and the equal classes of other models: weight [H]; hidden_states [..., H] to the same."""

    def __init__(self, hidden_size, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype == hidden_states.dtype:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon, None, None, True)
        # The host multiplies in the wider of the two dtypes, the op in that of hidden_states.
        return self.weight * rms_norm(hidden_states, None, self.variance_epsilon, None, None, True)


class TransformersT5LayerNorm(nn.Module):
    """T5LayerNorm and the equal classes of other models: weight [H]; hidden_states [..., H].

    Returns hidden_states' shape in the weight's dtype.
    """

    def __init__(self, hidden_size, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return t5_layer_norm(hidden_states, self.weight, self.variance_epsilon)


def transformers_l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """l2norm of Qwen3-Next: x to the same shape, normalized over `dim`."""
    return l2_norm(x.movedim(dim, -1), eps).movedim(-1, dim)


# Models whose class has LlamaRMSNorm's forward. Gemma's (weight + 1) and Olmo2's (rounds after the product) differ.
_LLAMA = (
    ("llama", "Llama"), ("mistral", "Mistral"), ("mixtral", "Mixtral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"),
    ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"), ("granite", "Granite"), ("smollm3", "SmolLM3"),
    ("phi3", "Phi3"), ("deepseek_v3", "DeepseekV3"),
)  # fmt: skip
# Models whose class has T5LayerNorm's forward.
_T5 = (
    ("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5"), ("longt5", "LongT5"), ("switch_transformers", "SwitchTransformers"),
    ("udop", "Udop"), ("pix2struct", "Pix2Struct"), ("pop2piano", "Pop2Piano"), ("kosmos2_5", "Kosmos2_5"),
)  # fmt: skip
_L2_NOTE = "transformers' linear attention binds the function at import: for forks and for our engine"


def _target(model: str, name: str, cls: str, seam: str = "leaf", note: str = "") -> Target:
    return Target(
        "transformers", f"transformers.models.{model}.modeling_{model}:{name}", cls, seam, note=note
    )


TARGETS = {
    "rms_norm": tuple(_target(model, f"{name}RMSNorm", "TransformersLlamaRMSNorm") for model, name in _LLAMA),
    "t5_layer_norm": tuple(
        _target(model, f"{name}LayerNorm", "TransformersT5LayerNorm") for model, name in _T5
    ),
    "l2_norm": (_target("qwen3_next", "l2norm", "transformers_l2norm", "function", _L2_NOTE),),
}
