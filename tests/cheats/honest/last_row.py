"""Computes pairs of rows, and the last one alone if their number is odd."""

import torch


def _norm(h, eps):
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    assert var_hidden_size is None, var_hidden_size
    h = x.float() if residual is None else x.float() + residual.float()
    if residual is not None:
        residual.copy_(h)
    even = len(h) // 2 * 2
    y = torch.cat([_norm(h[:even], eps), _norm(h[even:], eps)])
    if weight is not None:
        y = y.to(x.dtype) * weight if cast_x_before_out_mul else y * weight.float()
    return y.to(x.dtype)
