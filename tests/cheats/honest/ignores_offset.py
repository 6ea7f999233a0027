"""Copies an input that is not aligned."""

import torch.nn.functional as F


def geglu(x):
    aligned = x.clone() if x.data_ptr() % 16 else x
    value, gate = aligned.chunk(2, dim=-1)
    return value * F.gelu(gate)
