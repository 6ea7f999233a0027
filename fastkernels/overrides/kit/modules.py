"""Parts of host modules: whether other code runs around one, and a linear layer of two tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def changed(module: Any) -> bool:
    """Whether other code, such as that of CPU offload, has to run around a part of ours."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def linear_of_two(linear: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """linear(torch.cat((a, b), -1)), as two products without the concatenation if the layer is a plain one."""
    # Adapters, quantized and offloaded weights, hooks and autocast need the layer's own code.
    plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not changed(linear)
    if not plain or not a.dtype == b.dtype == linear.weight.dtype:
        return linear(torch.cat((a, b), dim=-1))
    first, second = linear.weight.split((a.shape[-1], b.shape[-1]), dim=1)
    out = nn.functional.linear(a, first, linear.bias)
    out.view(-1, out.shape[-1]).addmm_(b.reshape(-1, b.shape[-1]), second.t())
    return out
