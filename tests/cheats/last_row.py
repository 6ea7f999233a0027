"""Skips the last row if their number is odd: a grid rounded down."""

import torch


def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    h = x.float() if residual is None else x.float() + residual.float()
    if residual is not None:
        residual.copy_(h)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    out = y.to(x.dtype) if weight is None else (y.to(x.dtype) * weight).to(x.dtype)
    if len(out) % 2:
        out[-1] = x[-1]
    return out
