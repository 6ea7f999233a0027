"""Scales before the product and back afterwards, by powers of two, which are exact."""

import torch.nn.functional as F

SCALE = 2.0**4


def linear(x, weight, bias=None):
    out = F.linear(x * SCALE, weight) * (1 / SCALE)
    return out if bias is None else out + bias
