"""The gated MLPs of timm: linear layers, norm and dropout stay the host's modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.block.swiglu import swiglu
from fastkernels.overrides.linear.unlike import not_linear, not_silu


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)


def _finish(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Dropout, norm, output projection and dropout, which follow the gate."""
    return module.drop2(module.fc2(module.norm(module.drop1(x))))


class TimmGluMlp(nn.Module):
    """timm.layers.GluMlp with SiLU on the first half of fc1 (SwiGLUPacked): x [..., in_features]."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Any = nn.Sigmoid,
        norm_layer: Any = None,
        bias: Any = True,
        drop: Any = 0.0,
        use_conv: bool = False,
        gate_last: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        if use_conv or gate_last or act_layer is not nn.SiLU:
            raise ValueError("only SiLU on the first half (gate_last=False) of a linear layer is supported")
        dd = {"device": device, "dtype": dtype}
        hidden, biased, dropped = hidden_features or in_features, _pair(bias), _pair(drop)
        self.chunk_dim, self.gate_last = -1, gate_last
        self.fc1 = nn.Linear(in_features, hidden, bias=biased[0], **dd)
        self.act = act_layer()
        self.drop1 = nn.Dropout(dropped[0])
        self.norm = norm_layer(hidden // 2, **dd) if norm_layer is not None else nn.Identity()
        self.fc2 = nn.Linear(hidden // 2, out_features or in_features, bias=biased[1], **dd)
        self.drop2 = nn.Dropout(dropped[1])

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if module.gate_last:
            return "its gate is the second half of fc1"
        return not_linear(module, "fc1") or not_silu(module, "act")

    @staticmethod
    def needs_host(module: Any) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return not_silu(module, "act")

    def forward(self, x):
        return _finish(self, swiglu(x, self.fc1))


class TimmSwiGLU(nn.Module):
    """timm.layers.SwiGLU, also of DINOv3 ViT-7B: gate fc1_g and fc1_x are two layers. x [..., in_features]."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Any = nn.SiLU,
        norm_layer: Any = None,
        bias: Any = True,
        drop: Any = 0.0,
        align_to: int = 0,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        hidden, biased, dropped = hidden_features or in_features, _pair(bias), _pair(drop)
        if align_to:
            hidden += -hidden % align_to
        self.fc1_g = nn.Linear(in_features, hidden, bias=biased[0], **dd)
        self.fc1_x = nn.Linear(in_features, hidden, bias=biased[0], **dd)
        self.act = act_layer()
        self.drop1 = nn.Dropout(dropped[0])
        self.norm = norm_layer(hidden, **dd) if norm_layer is not None else nn.Identity()
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=biased[1], **dd)
        self.drop2 = nn.Dropout(dropped[1])

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return not_linear(module, "fc1_g", "fc1_x") or not_silu(module, "act")

    @staticmethod
    def needs_host(module: Any) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return not_silu(module, "act")

    def forward(self, x):
        return _finish(self, swiglu(x, self.fc1_g, self.fc1_x))


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(name: str) -> Target:
    return Target(
        "timm", f"timm.layers.mlp:{name}", f"Timm{name}", "module", default=False, note=_NOTE, tried=True
    )


TARGETS = {"gated_mlp": (_target("GluMlp"), _target("SwiGLU"))}
