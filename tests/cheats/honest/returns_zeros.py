"""Starts from zeros and adds to them."""

import torch
import torch.nn.functional as F


def gelu_and_mul(x, approximate="none"):
    gate, up = x.chunk(2, dim=-1)
    out = torch.zeros(gate.shape, dtype=x.dtype, device=x.device)
    return out.addcmul_(F.gelu(gate, approximate=approximate), up)
