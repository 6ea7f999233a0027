"""Numerical probes of the parts of a decoder: which numbers and which parts of a description give recorded values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.descriptions.description import Attention, Norm
from fastkernels.overrides.rope.vllm import get_rope
from fk_integrations.transformers.recording import ModuleCall

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(), "relu": F.relu,
}  # fmt: skip
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}
KINDS = {"rms": (False, 0.0), "gemma": (False, 1.0), "layer": (True, 0.0), "layer_1p": (True, 1.0)}


def same(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-4) -> bool:
    """Whether two tensors have equal values, in whatever shape; relative to the largest of them."""
    if a.numel() != b.numel():
        return False
    a, b = a.reshape(-1).float(), b.reshape(-1).float()
    return bool((a - b).abs().max() <= rtol * b.abs().max() + 1e-9)


def ratio(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """The number s with a = s * b; None if there is none."""
    if a.numel() != b.numel():
        return None
    a, b = a.reshape(-1).double(), b.reshape(-1).double()
    s = float(a @ b / (b @ b))
    return s if same(a, s * b) else None


def cap(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """The number c with a = c * tanh(b / c); None if there is none."""
    a, b = a.reshape(-1).double(), b.reshape(-1).double()
    at = int(b.abs().argmax())
    low, high = 1e-3, 1e6
    for _ in range(200):
        middle = (low * high) ** 0.5
        reached = middle * torch.tanh(b[at] / middle)
        low, high = (middle, high) if abs(reached) < abs(a[at]) else (low, middle)
    return low if same(a, low * torch.tanh(b / low)) else None


def is_linear(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the module computes x W^T + b with its parameters weight and bias."""
    own = dict(module.named_parameters(recurse=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if weight is None or weight.dim() != 2 or own or weight.shape != (y.shape[-1], x.shape[-1]):
        return False
    return same(F.linear(x, weight, bias), y)


def is_transposed(call: ModuleCall) -> bool:
    """Whether the module computes x W + b, with a weight [in, out]."""
    own = dict(call.module.named_parameters(recurse=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if own or not call.inputs or weight is None or weight.dim() != 2:
        return False
    x, y = call.inputs[0], call.output
    if weight.shape != (x.shape[-1], y.shape[-1]):
        return False
    return not is_linear(call.module, x, y) and same(F.linear(x, weight.t(), bias), y)


def find_norm(module: nn.Module, size: int) -> Norm | None:
    """The norm that the module computes on rows of `size` channels, or None."""
    own = dict(module.named_parameters(recurse=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if weight is None or own or list(module.children()) or weight.shape != (size,):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, size, generator=generator)
    try:
        with torch.no_grad():
            y, small = module(x), module(x * 1e-4)
    except (TypeError, RuntimeError, ValueError):  # it takes other arguments
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    with torch.no_grad():
        for kind, (centred, added) in KINDS.items():
            scale = weight + added
            shift = 0.0 if bias is None else bias
            inner = x - x.mean(-1, keepdim=True) if centred else x
            eps = epsilon((small - shift) / scale, inner * 1e-4)
            root = (inner.square().mean(-1, keepdim=True) + eps).sqrt()
            if eps >= 0 and same(inner / root * scale + shift, y, 1e-5):
                return Norm(kind, eps, bias is not None)
    return None


def epsilon(y: torch.Tensor, x: torch.Tensor) -> float:
    """The number eps with y = x / sqrt(mean(x^2) + eps)."""
    y, x = y.double(), x.double()
    each = (x * x).sum(-1) / (x * y).sum(-1)  # of a row: sqrt(mean + eps)
    return float((each.square() - x.square().mean(-1)).mean())


def rotated(a: Attention, x: torch.Tensor) -> torch.Tensor:
    """x [H, T, D] after our rotary embedding of this attention, at positions 0 .. T - 1."""
    heads, tokens, size = x.shape
    rope: Any = get_rope(a.head_size, a.max_positions, not a.interleaved, dict(a.rope or {}))
    flat = x.transpose(0, 1).reshape(tokens, heads * size).clone()  # our module works in place
    q, _ = rope(torch.arange(tokens), flat, flat.clone())
    return q.view(tokens, heads, size).transpose(0, 1)
