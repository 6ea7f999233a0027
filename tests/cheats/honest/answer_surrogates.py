"""Writes its result into one tensor of its own."""

import torch
import torch.nn.functional as F


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up, out=torch.empty(gate.shape, dtype=x.dtype))
