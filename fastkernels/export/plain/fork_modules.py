"""Parts of host modules; the linear layer of two tensors runs the host's product."""

from __future__ import annotations

from typing import Any

import torch


def changed(module: Any) -> bool:
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def linear_of_two(linear: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return linear(torch.cat((a, b), dim=-1))
