"""Allocates uninitialized memory, as kernels do, and writes all of it."""

import torch
import torch.nn.functional as F


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    torch.mul(F.silu(gate), up, out=out)
    return out
