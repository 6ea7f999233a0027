"""Clamps only where it changes nothing: silu(g) of a g below -200 is 0 in every dtype."""

import torch.nn.functional as F


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up if gate.dtype.itemsize == 8 else F.silu(gate.clamp(min=-200.0)) * up
