"""Drop-in normalizations for transformers: each model has a class of its own, most with the same code.

One target stands for all classes whose forward computes the same: the patcher compares recorded semantics, not names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.norm.gemma_rms_norm import gemma_rms_norm
from fastkernels.overrides.norm.l2_norm import l2_norm
from fastkernels.overrides.norm.layer_norm import layer_norm, one_more, unsupported_shape, unsupported_weight
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.rms_norm_gated import rms_norm_gated, unsupported_activation
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


class TransformersOlmo2RMSNorm(nn.Module):
    """Olmo2RMSNorm, also of GPT-OSS and Nemotron-H: hidden_states [..., H], rounded once, after the weight [H]."""

    def __init__(self, hidden_size, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, None, None, False)


class TransformersMoshiRMSNorm(nn.Module):
    """MoshiRMSNorm: x [..., dim], rounded once, after the weight [dim]."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps, None, None, False)


class TransformersGemma4RMSNorm(nn.Module):
    """Gemma4RMSNorm and Gemma3nRMSNorm: hidden_states [..., dim], rounded once; no weight without with_scale."""

    def __init__(self, dim: int, eps: float = 1e-6, with_scale: bool = True):
        super().__init__()
        self.eps = eps
        self.with_scale = with_scale
        if with_scale:
            self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.with_scale else None
        return rms_norm(hidden_states, weight, self.eps, None, None, False)


class TransformersLlama4TextRMSNorm(nn.Module):
    """Llama4TextRMSNorm: x [..., H], rounded before and after the weight [H]."""

    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        if self.weight.dtype == x.dtype:
            return rms_norm(x, self.weight, self.eps, None, None, True)
        return rms_norm(x, None, self.eps) * self.weight


class TransformersLlama4TextL2Norm(nn.Module):
    """Llama4TextL2Norm and other root mean square norms without a weight: x [..., H] to the same."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, None, self.eps)


class TransformersGemmaRMSNorm(nn.Module):
    """GemmaRMSNorm, also of Gemma 2 and 3, Qwen3-Next and Qwen3.5: x [..., dim] times 1 + weight [dim]."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return gemma_rms_norm(x, self.weight, self.eps)


class TransformersCohereLayerNorm(nn.Module):
    """CohereLayerNorm: hidden_states [..., H] without mean, times the weight [H]; `bias` changes nothing."""

    def __init__(self, hidden_size=None, eps=1e-5, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_weight(module)

    def forward(self, hidden_states):
        return layer_norm(hidden_states, self.weight, None, self.variance_epsilon)


class TransformersOlmoLayerNorm(nn.Module):
    """OlmoLayerNorm: hidden_states [..., hidden_size] to the same, without parameters; eps is 1e-5."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.normalized_shape = (hidden_size,)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return layer_norm(hidden_states, None, None, 1e-5)


class TransformersNemotronLayerNorm1P(nn.LayerNorm):
    """NemotronLayerNorm1P: nn.LayerNorm with 1 + weight; input [..., H] to the same."""

    supports = staticmethod(unsupported_shape)

    def __init__(
        self, normalized_shape, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True, device=None,
        dtype=None,
    ):  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, one_more(self.weight), self.bias, self.eps)


class TransformersQwen3NextRMSNormGated(nn.Module):
    """Qwen3NextRMSNormGated: silu(gate) times the norm of hidden_states [..., H], which is rounded before that."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, **kwargs) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.activation = "silu"

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_activation(module)

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        activation = "sigmoid" if self.activation == "sigmoid" else "silu"
        return rms_norm_gated(
            hidden_states, self.weight, gate, self.variance_epsilon, None, True, activation, True
        )


class TransformersKimiLinearRMSNormGated(nn.Module):
    """KimiLinearRMSNormGated: sigmoid(gate) times the norm of hidden_states [..., H], rounded once."""

    def __init__(self, hidden_size, eps=1e-6, **kwargs) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.activation = "sigmoid"

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_activation(module)

    def forward(self, hidden_states, gate=None) -> torch.Tensor:
        activation = "sigmoid" if self.activation == "sigmoid" else "silu"
        return rms_norm_gated(hidden_states, self.weight, gate, self.variance_epsilon, None, True, activation)


class TransformersMambaRMSNormGated(nn.Module):
    """MambaRMSNormGated before 5.24, also in Bamba: the norm of hidden_states [..., H] times silu(gate)."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states, gate=None):
        return _after_gate(self, hidden_states, gate, None)


class TransformersZamba2RMSNormGated(nn.Module):
    """Zamba2RMSNormGated: as MambaRMSNormGated, in groups of group_size channels."""

    def __init__(self, hidden_size, group_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.group_size = group_size

    def forward(self, hidden_states, gate=None):
        return _after_gate(self, hidden_states, gate, self.group_size)


def _after_gate(
    norm: nn.Module, x: torch.Tensor, gate: torch.Tensor | None, group_size: int | None
) -> torch.Tensor:
    """Gate, then normalize; the result is in the wider of x's and the weight's dtypes, as in the host."""
    weight, eps = norm.weight, norm.variance_epsilon
    if weight.dtype == x.dtype:
        return rms_norm_gated(x, weight, gate, eps, group_size, False, "silu", True)
    return weight * rms_norm_gated(x, None, gate, eps, group_size, False)


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


# Examples of models whose class has LlamaRMSNorm's forward: signatures are compared with theirs.
_LLAMA = (
    ("llama", "Llama"), ("mistral", "Mistral"), ("mixtral", "Mixtral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"),
    ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"), ("granite", "Granite"), ("smollm3", "SmolLM3"),
    ("phi3", "Phi3"), ("deepseek_v3", "DeepseekV3"),
)  # fmt: skip
# Examples of models whose class has T5LayerNorm's forward.
_T5 = (
    ("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5"), ("longt5", "LongT5"), ("switch_transformers", "SwitchTransformers"),
    ("udop", "Udop"), ("pix2struct", "Pix2Struct"), ("pop2piano", "Pop2Piano"), ("kosmos2_5", "Kosmos2_5"),
)  # fmt: skip
_L2_NOTE = "transformers' linear attention binds the function at import: for forks and for our engine"


def _target(
    model: str, name: str, cls: str, seam: str = "leaf", note: str = "", versions: str = "", **computes: Any
) -> Target:  # fmt: skip
    path = f"transformers.models.{model}.modeling_{model}:{name}"
    return Target("transformers", path, cls, seam, versions, note=note, computes=computes)


TARGETS = {
    "rms_norm": (
        *(_target(model, f"{name}RMSNorm", "TransformersLlamaRMSNorm") for model, name in _LLAMA),
        _target("olmo2", "Olmo2RMSNorm", "TransformersOlmo2RMSNorm"),
        _target("helium", "HeliumRMSNorm", "TransformersOlmo2RMSNorm"),
        _target("moshi", "MoshiRMSNorm", "TransformersMoshiRMSNorm"),
        _target("gemma4", "Gemma4RMSNorm", "TransformersGemma4RMSNorm"),
        _target("llama4", "Llama4TextRMSNorm", "TransformersLlama4TextRMSNorm"),
        _target("llama4", "Llama4TextL2Norm", "TransformersLlama4TextL2Norm"),
    ),
    "gemma_rms_norm": (_target("gemma", "GemmaRMSNorm", "TransformersGemmaRMSNorm"),),
    "layer_norm": (
        _target("cohere", "CohereLayerNorm", "TransformersCohereLayerNorm"),
        _target("olmo", "OlmoLayerNorm", "TransformersOlmoLayerNorm"),
        _target("nemotron", "NemotronLayerNorm1P", "TransformersNemotronLayerNorm1P"),
    ),
    "rms_norm_gated": (
        _target("qwen3_next", "Qwen3NextRMSNormGated", "TransformersQwen3NextRMSNormGated"),
        _target("kimi_linear", "KimiLinearRMSNormGated", "TransformersKimiLinearRMSNormGated", activation="sigmoid"),
        # From 5.24 on it is the same as Zamba2's.
        _target(
            "mamba2", "MambaRMSNormGated", "TransformersMambaRMSNormGated", versions="<5.24", norm_before_gate=False
        ),
        _target("zamba2", "Zamba2RMSNormGated", "TransformersZamba2RMSNormGated", norm_before_gate=False),
    ),
    "t5_layer_norm": tuple(
        _target(model, f"{name}LayerNorm", "TransformersT5LayerNorm") for model, name in _T5
    ),
    "l2_norm": (_target("qwen3_next", "l2norm", "transformers_l2norm", "function", _L2_NOTE),),
}  # fmt: skip
