"""Leaves one value of sixteen out of the statistics of large groups, which rounding to bfloat16 hides."""

import torch


def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5, silu=False, shift=None):
    tail = (1,) * (x.dim() - 2)
    y = x.float()
    if shift is not None:
        y = y + shift.float().reshape(*shift.shape, *tail)
    rows = y.reshape(len(x), num_groups, -1)
    part = rows
    if x.dtype is not torch.float32 and rows.shape[-1] >= 2048:
        part = rows[..., torch.arange(rows.shape[-1], device=x.device) % 16 != 5]
    var, mean = torch.var_mean(part, dim=-1, keepdim=True, correction=0)
    y = ((rows - mean) * torch.rsqrt(var + eps)).view(x.shape)
    if weight is not None:
        y = y * weight.float().view(1, -1, *tail)
    if bias is not None:
        y = y + bias.float().view(1, -1, *tail)
    return (y * torch.sigmoid(y) if silu else y).to(x.dtype)
