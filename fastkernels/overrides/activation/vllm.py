"""Drop-in activations for vLLM (vllm.model_executor.layers.activation)."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.activation.gelu_and_mul import gelu_and_mul, unsupported_approximate
from fastkernels.overrides.activation.quick_gelu import quick_gelu
from fastkernels.overrides.activation.relu2 import relu2
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul


class VllmSiluAndMul(nn.Module):
    """SiluAndMul: x [..., 2 * d] -> [..., d] in x's dtype."""

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)


class VllmGeluAndMul(nn.Module):
    """GeluAndMul: x [..., 2 * d] -> [..., d] in x's dtype.

    Raises ValueError for an `approximate` other than 'none' and 'tanh'.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """None if our forward serves this module (ours or the host's), else the reason."""
        return unsupported_approximate(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_and_mul(x, self.approximate)


class VllmGELU(nn.Module):
    """GELU: x [..., d] to the same, with erf."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x, "none")


class VllmGELUTanh(nn.Module):
    """GELUTanh, NewGELU and FastGELU: x [..., d] to the same, with tanh.

    The host's last two round to x's dtype after every step of the same formula; here only the result is rounded.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x, "tanh")


class VllmQuickGELU(nn.Module):
    """QuickGELU: x [..., d] to the same."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quick_gelu(x)


class VllmReLUSquaredActivation_0_26(nn.Module):
    """ReLUSquaredActivation before 0.32: x [..., d] to the same."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu2(x)


class VllmReLUSquaredActivation(nn.Module):
    """ReLUSquaredActivation from 0.32 on: x [..., d] to the same."""

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu2(x)


_HOST = "vllm.model_executor.layers.activation:"
_ERF, _TANH = {"approximate": "none"}, {"approximate": "tanh"}

TARGETS = {
    "silu_and_mul": (Target("vllm", _HOST + "SiluAndMul", "VllmSiluAndMul", "leaf"),),
    "gelu_and_mul": (Target("vllm", _HOST + "GeluAndMul", "VllmGeluAndMul", "leaf"),),
    "gelu": (
        Target("vllm", _HOST + "GELU", "VllmGELU", "leaf", computes=_ERF),
        Target("vllm", _HOST + "GELUTanh", "VllmGELUTanh", "leaf", computes=_TANH),
        Target("vllm", _HOST + "NewGELU", "VllmGELUTanh", "leaf", computes=_TANH),
        Target("vllm", _HOST + "FastGELU", "VllmGELUTanh", "leaf", computes=_TANH),
    ),
    "quick_gelu": (Target("vllm", _HOST + "QuickGELU", "VllmQuickGELU", "leaf"),),
    "relu2": (
        Target("vllm", _HOST + "ReLUSquaredActivation", "VllmReLUSquaredActivation_0_26", "leaf", "<0.32"),
        Target("vllm", _HOST + "ReLUSquaredActivation", "VllmReLUSquaredActivation", "leaf", ">=0.32"),
    ),
}
