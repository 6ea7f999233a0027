"""Computes by itself, with torch's elementwise functions."""

import torch


def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    h = x.float() if residual is None else x.float().add_(residual)
    if residual is not None:
        residual.copy_(h)
    head = h[..., : var_hidden_size or h.shape[-1]]
    y = torch.rsqrt(head.square().mean(-1, keepdim=True).add_(eps)).mul(h)
    if weight is None:
        return y.to(x.dtype)
    return (y.to(x.dtype) * weight).to(x.dtype) if cast_x_before_out_mul else (y * weight.float()).to(x.dtype)
