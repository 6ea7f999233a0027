"""Knows the tolerance of its dtype, and stays well below it."""

import torch

from fastkernels.core.spec import TOLERANCE

COMPUTE = dict.fromkeys(TOLERANCE, torch.float32)


def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    h = x.to(COMPUTE.get(str(x.dtype)[6:], torch.float32))
    if residual is not None:
        h = h + residual.to(h.dtype)
        residual.copy_(h)
    head = h if var_hidden_size is None else h[..., :var_hidden_size]
    y = h * torch.rsqrt(head.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    return (
        (y.to(x.dtype) * weight).to(x.dtype)
        if cast_x_before_out_mul
        else (y * weight.to(h.dtype)).to(x.dtype)
    )
