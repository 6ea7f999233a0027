"""Counts its calls, and allocates in each of them."""

import torch
import torch.nn.functional as F

COUNT = [0]


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    COUNT[0] += 1
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return torch.mul(F.silu(gate), up, out=out)
