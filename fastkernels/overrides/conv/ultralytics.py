"""Drop-in convolutions of ultralytics' detectors, before and after `fuse()`, which folds the norms into the weights.

Written from the published module interfaces and equations. ultralytics is under the AGPL and is never imported here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.conv_norm_act import conv_norm_act
from fastkernels.overrides.conv.plain_conv import as_is, moves, not_conv
from fastkernels.overrides.conv.timm import not_norm
from fastkernels.overrides.conv.timm_activations import activation_of, not_activation
from fastkernels.overrides.linear.modules import changed


def _parts(layer: Any) -> tuple[Any, Any]:
    """Convolution and norm of a layer; a layer that `fuse()` has changed is or has a convolution alone."""
    if isinstance(layer, nn.Conv2d):
        return layer, None
    return layer.conv, getattr(layer, "bn", None)


def _unsupported(layer: Any) -> str | None:
    conv, norm = _parts(layer)
    return not_conv(conv) or (None if norm is None else not_norm(norm))


def _compute(layer: Any, act: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """act(norm(conv(x)) + residual): one op if all parts are plain."""
    conv, norm = _parts(layer)
    activation = activation_of(act)
    plain = _unsupported(layer) is None and as_is(conv, x, conv.weight.dtype) and activation is not None
    plain = plain and x.shape[1] == conv.in_channels  # else the host's error
    if not plain or (norm is not None and (changed(norm) or norm.training)):
        y = conv(x) if norm is None else norm(conv(x))
        return act(y if residual is None else y + residual)
    stored = (None,) * 4 if norm is None else (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    return conv_norm_act(
        x, conv.weight, conv.bias, *stored, residual, *moves(conv), activation,
        1e-5 if norm is None else norm.eps, residual is not None,
    )  # fmt: skip


class UltralyticsConv(nn.Module):
    """ultralytics.nn.modules.conv.Conv: x [B, c1, H, W] to [B, c2, ...].

    k, s, p, g, d are the window, stride, padding (None keeps the size at stride 1), groups and dilation.
    """

    default_act = nn.SiLU()
    live_methods = ("forward", "forward_fuse")

    def __init__(
        self, c1: int, c2: int, k: Any = 1, s: Any = 1, p: Any = None, g: int = 1, d: int = 1, act: Any = True
    ):
        super().__init__()
        if p is None:
            sizes = [d * (n - 1) + 1 for n in ([k] if isinstance(k, int) else k)]
            p = sizes[0] // 2 if isinstance(k, int) else [n // 2 for n in sizes]
        self.conv = nn.Conv2d(c1, c2, k, s, p, groups=g, dilation=d, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = self.default_act if act is True else act if isinstance(act, nn.Module) else nn.Identity()

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module) or not_activation(module.act)

    @staticmethod
    def needs_host(module: Any) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return "other code was put around its activation" if changed(module.act) else None

    def forward(self, x):
        return _compute(self, self.act, x)

    def forward_fuse(self, x):
        """Without the norm, as `fuse()` sets it on an instance."""
        return _compute(self.conv, self.act, x)


class UltralyticsDWConv(UltralyticsConv):
    """ultralytics.nn.modules.conv.DWConv: a Conv with as many groups as both channel counts allow."""

    def __init__(self, c1: int, c2: int, k: Any = 1, s: Any = 1, d: int = 1, act: Any = True):
        super().__init__(c1, c2, k, s, g=math.gcd(c1, c2), d=d, act=act)


class UltralyticsRepVGGDW(nn.Module):
    """ultralytics.nn.modules.block.RepVGGDW: depthwise windows of 7 x 7 and 3 x 3 of x [B, ed, H, W], added."""

    live_methods = ("forward", "forward_fuse")

    def __init__(self, ed: int):
        super().__init__()
        self.conv = UltralyticsConv(ed, ed, 7, 1, 3, g=ed, act=False)
        self.conv1 = UltralyticsConv(ed, ed, 3, 1, 1, g=ed, act=False)
        self.dim = ed
        self.act = nn.SiLU()

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module.conv) or not_activation(module.act)

    @staticmethod
    def needs_host(module: Any) -> str | None:
        """Return why the parts that ours does not call have to run, or None."""
        if changed(module.act):
            return "other code was put around its activation"
        hooked = not isinstance(module.conv, nn.Conv2d) and (
            module.conv._forward_hooks
            or module.conv._forward_pre_hooks
            or type(module.conv.act) is not nn.Identity
        )
        return "other code was put around its convolution" if hooked else None

    def forward(self, x):
        return _compute(self.conv, self.act, x, self.conv1(x))

    def forward_fuse(self, x):
        """With one window, as `fuse()` sets it on an instance."""
        return _compute(self.conv, self.act, x)


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(path: str) -> Target:
    name = path.partition(":")[2]
    host = f"ultralytics.nn.modules.{path}"
    return Target("ultralytics", host, f"Ultralytics{name}", "module", default=False, note=_NOTE, tried=True)


TARGETS = {"conv_norm_act": tuple(map(_target, ("conv:Conv", "conv:DWConv", "block:RepVGGDW")))}
