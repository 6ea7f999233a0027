"""Whether a host's convolution is one that our ops compute, and how it moves over an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.linear.modules import autocasts, changed


def not_conv(conv: Any) -> str | None:
    """Return why the op does not compute this convolution, or None."""
    if type(conv).__name__ != "Conv2d" or not isinstance(conv, nn.Conv2d):
        return f"its convolution is a {type(conv).__name__}"
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return f"its convolution has padding={conv.padding!r} with padding_mode={conv.padding_mode!r}"
    if type(conv.weight) is not nn.Parameter:
        return f"its convolution's weight is a {type(conv.weight).__name__}"
    return None


def as_is(module: Any, x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a module of the host needs none of its own code for x."""
    return not changed(module) and x.dim() == 4 and x.dtype == dtype and not autocasts(x)


def moves(conv: Any) -> tuple[Any, ...]:
    """Stride, padding, dilation and groups."""
    return conv.stride, conv.padding, conv.dilation, conv.groups
