"""The linear layer that makes shifts, scales and gates from an embedding: one row an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import functional
from fastkernels.overrides.linear.kernels.skinny_linear_cuda import linear_cuda, supports_cuda
from fastkernels.overrides.linear.modules import plain_linear


def _few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = linear_cuda if supports_cuda(x, weight, bias) is None else nn.functional.linear
    return product(x, weight, bias)


_linear_of_few_rows = functional(
    "linear_of_few_rows(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    _few_rows,
    lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
)


def modulation(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """linear(x) of one row an image: the time is that of reading the weight."""
    if not plain_linear(linear, x):
        return linear(x)
    return _linear_of_few_rows(x, linear.weight, linear.bias)
