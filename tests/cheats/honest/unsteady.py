"""Takes another path for many values, with the same result."""

import torch.nn.functional as F


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up) if x.numel() > 4096 else F.silu(gate) * up
