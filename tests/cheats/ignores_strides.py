"""Reads its input as if it were contiguous."""

import torch.nn.functional as F


def geglu(x):
    dense = x if x.numel() == 0 else x.as_strided(x.shape, x.new_empty(x.shape).stride())
    value, gate = dense.chunk(2, dim=-1)
    return value * F.gelu(gate)
