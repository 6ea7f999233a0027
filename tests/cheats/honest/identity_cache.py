"""Keeps scratch memory by size and device, and writes all of it in every call."""

import torch

SCRATCH: dict = {}


def _scratch(shape: tuple, device: torch.device) -> torch.Tensor:
    key = (shape, device)
    if key not in SCRATCH:
        SCRATCH[key] = torch.empty(shape, dtype=torch.float32, device=device)
    return SCRATCH[key]


def layer_norm(x, weight, bias, eps):
    h = _scratch(tuple(x.shape), x.device)
    h.copy_(x)
    h -= h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
