"""Reads from the aligned address in front of its input, as a vector load does."""

import torch.nn.functional as F


def geglu(x):
    aligned = x.as_strided(x.shape, x.stride(), x.storage_offset() - x.data_ptr() % 16 // x.element_size())
    value, gate = aligned.chunk(2, dim=-1)
    return value * F.gelu(gate)
