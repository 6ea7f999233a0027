"""Drop-in normalizations for timm (timm.layers.norm)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.norm.layer_norm import layer_norm, unsupported_shape
from fastkernels.overrides.norm.rms_norm import rms_norm


def _unsupported(module: Any) -> str | None:
    """Why our forward does not support this norm (ours or the host's), or None."""
    if getattr(module, "_fast_norm", False):
        return "it was built under set_fast_norm, which casts to autocast's dtype"
    return unsupported_shape(module)


def _as_torch(x: torch.Tensor) -> torch.Tensor:
    """x as torch's norms take it: under autocast they compute in, and return, float32."""
    return x.float() if x.is_cuda and torch.is_autocast_enabled("cuda") else x


class TimmLayerNorm(nn.LayerNorm):
    """timm.layers.LayerNorm over the last dimension: x [..., num_channels]."""

    supports = staticmethod(_unsupported)

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True, **kwargs: Any) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(_as_torch(x), self.weight, self.bias, self.eps)


class TimmLayerNormFp32(nn.LayerNorm):
    """timm.layers.LayerNormFp32: x [..., num_channels], computed in float32, returned in x's dtype."""

    supports = staticmethod(_unsupported)

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True, **kwargs: Any) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class TimmLayerNorm2d(nn.LayerNorm):
    """timm.layers.LayerNorm2d over the channels of x [B, num_channels, H, W]; free of copies in channels_last."""

    supports = staticmethod(_unsupported)

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True, **kwargs: Any) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = _as_torch(x).permute(0, 2, 3, 1).contiguous()
        return layer_norm(last, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class _RmsNorm(nn.Module):
    """Base of both RMS norms of timm: weight [channels] or None."""

    supports = staticmethod(_unsupported)

    def __init__(
        self, channels: int, eps: float = 1e-6, affine: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.normalized_shape = (channels,) if isinstance(channels, int) else tuple(channels)
        self.eps = eps
        self.elementwise_affine = affine
        weight = torch.ones(self.normalized_shape, device=device, dtype=dtype) if affine else None
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))


class TimmRmsNorm(_RmsNorm):
    """timm.layers.RmsNorm over the last dimension: x [..., channels], rounded once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(_as_torch(x), self.weight, self.eps, None, None, False)


class TimmRmsNormFp32(_RmsNorm):
    """timm.layers.RmsNormFp32: x [..., channels], computed in float32, returned in x's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, None, None, False)


def _target(name: str) -> Target:
    return Target("timm", f"timm.layers.norm:{name}", f"Timm{name}", "leaf")


TARGETS = {
    "layer_norm": (_target("LayerNorm"), _target("LayerNormFp32"), _target("LayerNorm2d")),
    "rms_norm": (_target("RmsNorm"), _target("RmsNormFp32")),
}
