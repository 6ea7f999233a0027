"""Expands a scalar, and multiplies by it."""

import torch
import torch.nn.functional as F


def gelu_and_mul(x, approximate="none"):
    gate, up = x.chunk(2, dim=-1)
    one = torch.ones((), dtype=x.dtype, device=x.device).expand_as(gate)
    return F.gelu(gate, approximate=approximate) * up * one
