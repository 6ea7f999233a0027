"""The mean square of all values of a row."""

import torch


def rms_norm(x, weight=None, eps=1e-6, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    wide = x.float()
    if residual is not None:
        wide = wide + residual.float()
        residual.copy_(wide)
    row = wide if var_hidden_size is None else wide[..., :var_hidden_size]
    out = wide * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None and cast_x_before_out_mul:
        return out.to(x.dtype) * weight
    return (out if weight is None else out * weight.float()).to(x.dtype)
