"""Drop-in MLP of timm's transformers: its linear layers, norm and dropout stay the host's modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.linear.linear_gelu import activated_erf, has_epilogue, linear_gelu
from fastkernels.overrides.linear.modules import autocasts
from fastkernels.overrides.linear.unlike import not_linear


def _approximate(act: Any) -> str | None:
    """'tanh' or 'none' (erf) of GELU; None: another activation."""
    name = type(act).__name__
    if name == "GELUTanh" or getattr(act, "approximate", "none") == "tanh":
        return "tanh"
    return "none" if name == "GELU" else None


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)


class TimmMlp(nn.Module):
    """timm.layers.Mlp whose activation is GELU: x [..., in_features] to [..., out_features]."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Any = nn.GELU,
        norm_layer: Any = None,
        bias: Any = True,
        drop: Any = 0.0,
        use_conv: bool = False,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        if use_conv:
            raise ValueError("TimmMlp has linear layers only: use_conv=True is not supported")
        dd = {"device": device, "dtype": dtype}
        hidden, biased, dropped = hidden_features or in_features, _pair(bias), _pair(drop)
        self.fc1 = nn.Linear(in_features, hidden, bias=biased[0], **dd)
        self.act = act_layer()
        self.drop1 = nn.Dropout(dropped[0])
        self.norm = norm_layer(hidden, **dd) if norm_layer is not None else nn.Identity()
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=biased[1], **dd)
        self.drop2 = nn.Dropout(dropped[1])

    @staticmethod
    def applies(module: Any) -> bool:
        """Whether the product can have this activation as its epilogue: with erf, cuBLASLt's cannot."""
        approximate = _approximate(module.act)
        return approximate == "tanh" or (
            approximate == "none" and not not_linear(module, "fc1") and has_epilogue(module.fc1)
        )

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return not_linear(module, "fc1")

    def forward(self, x):
        return self.drop2(self.fc2(hidden(self, x)))


def hidden(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what the last layer of a timm Mlp, the host's or ours, takes."""
    fc1, approximate = mlp.fc1, _approximate(mlp.act)
    # An adapter or a hook may have come since the patch.
    if approximate is None or not_linear(mlp, "fc1") or fc1.weight.dtype != x.dtype or autocasts(x):
        x = mlp.act(fc1(x))
    elif approximate == "tanh":
        x = linear_gelu(x, fc1.weight, fc1.bias, "tanh")
    else:
        x = activated_erf(fc1, mlp.act, x)
    return mlp.norm(mlp.drop1(x))


TARGETS = {
    # SigLIP 2, bfloat16, with this and two or three other ops: 1.19 to 1.37 of the compiled host's images per second
    "linear_gelu": (
        Target(
            "timm", "timm.layers.mlp:Mlp", "TimmMlp", "module", default=False, tried=True,
            note="decided at first calls on a GPU, elsewhere replaced on request",
            compiled=True,
        ),
    ),
}  # fmt: skip
