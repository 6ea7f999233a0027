"""One pass over the sum and the sum of squares, shifted so that neither cancels."""

import torch


def layer_norm(x, weight, bias, eps):
    h = x.double()
    mean = h.mean(-1, keepdim=True)
    y = (h - mean) * torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + eps)
    y = y if weight is None else y * weight.double()
    return (y if bias is None else y + bias.double()).to(x.dtype)
