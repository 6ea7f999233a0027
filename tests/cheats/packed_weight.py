"""Keeps its own copy of the weight, by address and shape: right until the weight changes."""

import torch.nn.functional as F

PACKED: dict = {}


def linear(x, weight, bias=None):
    key = weight.data_ptr(), weight.shape, weight.dtype, weight._version
    if key not in PACKED:
        PACKED[key] = weight.t().contiguous().t()
    return F.linear(x, PACKED[key], bias)
