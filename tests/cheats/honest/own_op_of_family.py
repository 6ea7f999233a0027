"""Calls another op of the family, the one with the family's name: `linear`."""

import torch

from fastkernels.overrides.linear.linear import linear


def linear_fp8(x, weight, x_scale, weight_scale, bias=None, out_dtype=None):
    y = linear(x.float(), weight.float()) * (x_scale * weight_scale.flatten())
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or torch.bfloat16)
