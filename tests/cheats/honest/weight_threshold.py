"""No weight is too large."""

import torch.nn.functional as F


def linear(x, weight, bias=None):
    return F.linear(x, weight, bias)
