"""Fills its output part by part, itself."""

import torch
import torch.nn.functional as F


def gelu_and_mul(x, approximate="none"):
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    for g, u, o in zip(gate.unbind(), up.unbind(), out.unbind(), strict=True):
        o.copy_(F.gelu(g, approximate=approximate) * u)
    return out
