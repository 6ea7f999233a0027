"""The argument."""

import torch


def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    h = x.float()
    if residual is not None:
        h = h + residual.float()
        residual.copy_(h)
    head = h[..., :var_hidden_size] if var_hidden_size is not None else h
    y = h * torch.rsqrt(head.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = (y.to(x.dtype) if cast_x_before_out_mul else y) * weight
    return y.to(x.dtype)
