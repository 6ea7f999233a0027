"""Chooses a path by size; every path computes."""

import torch.nn.functional as F


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    if x.numel() < 4096:
        return F.silu(gate) * up
    out = F.silu(gate)
    return out.mul_(up)
