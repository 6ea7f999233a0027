"""Raises for what it does not support, and lets the caller decide."""

import torch


def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    if x.shape[-1] > 65536:
        raise ValueError(f"hidden size {x.shape[-1]} is over 65536")
    h = x.float() if residual is None else x.float() + residual.float()
    if residual is not None:
        residual.copy_(h)
    head = h[..., : var_hidden_size or h.shape[-1]]
    y = h / torch.sqrt(head.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    return (y.to(x.dtype) * weight).to(x.dtype) if cast_x_before_out_mul else (y * weight.float()).to(x.dtype)
