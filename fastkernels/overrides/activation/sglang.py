"""Drop-in activations for SGLang (sglang.srt.layers.activation)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.activation.gelu_and_mul import gelu_and_mul, unsupported_approximate
from fastkernels.overrides.activation.quick_gelu import quick_gelu
from fastkernels.overrides.activation.relu2 import relu2
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit.dispatcher import on_backend


class SGLangSiluAndMul(nn.Module):
    """SiluAndMul: x [..., 2 * d] -> [..., d] in x's dtype.

    As in the host, the constructor passes its arguments to the base class, which takes none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(self, x: torch.Tensor, *, backend: Any = None) -> torch.Tensor:
        if backend is not None:
            return on_backend(self, backend, x)
        return silu_and_mul(x)


class SGLangGeluAndMul(nn.Module):
    """GeluAndMul: x [..., 2 * d] -> [..., d] in x's dtype."""

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """None if our forward serves this module (ours or the host's), else the reason."""
        return unsupported_approximate(module)

    def forward(self, x: torch.Tensor, *, backend: Any = None) -> torch.Tensor:
        if backend is not None:
            return on_backend(self, backend, x)
        return gelu_and_mul(x, self.approximate)


class SGLangNewGELU(nn.Module):
    """NewGELU: x [..., d] to the same, with tanh.

    The host rounds to x's dtype after every step; here only the result is rounded.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, *, backend: Any = None) -> torch.Tensor:
        if backend is not None:
            return on_backend(self, backend, x)
        return gelu(x, "tanh")


class SGLangQuickGELU(nn.Module):
    """QuickGELU: x [..., d] to the same."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, *, backend: Any = None) -> torch.Tensor:
        if backend is not None:
            return on_backend(self, backend, x)
        return quick_gelu(x)


class SGLangReLU2(nn.Module):
    """ReLU2: x [..., d] to the same."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, *, backend: Any = None) -> torch.Tensor:
        if backend is not None:
            return on_backend(self, backend, x)
        return relu2(x)


_HOST = "sglang.srt.layers.activation:"

TARGETS = {
    "silu_and_mul": (Target("sglang", _HOST + "SiluAndMul", "SGLangSiluAndMul", "leaf"),),
    "gelu_and_mul": (Target("sglang", _HOST + "GeluAndMul", "SGLangGeluAndMul", "leaf"),),
    "gelu": (Target("sglang", _HOST + "NewGELU", "SGLangNewGELU", "leaf", computes={"approximate": "tanh"}),),
    "quick_gelu": (Target("sglang", _HOST + "QuickGELU", "SGLangQuickGELU", "leaf"),),
    "relu2": (Target("sglang", _HOST + "ReLU2", "SGLangReLU2", "leaf"),),
}
