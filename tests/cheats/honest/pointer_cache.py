"""Uses addresses for their alignment only."""

import torch.nn.functional as F


def linear(x, weight, bias=None):
    if x.data_ptr() % 16 or not x.is_contiguous():
        x = x.contiguous()
    return F.linear(x, weight, bias)
