"""The statistics of all values."""

import torch


def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5, silu=False, shift=None):
    tail = (1,) * (x.dim() - 2)
    y = x.float()
    if shift is not None:
        y = y + shift.float().reshape(*shift.shape, *tail)
    rows = y.reshape(len(x), num_groups, -1)
    var, mean = torch.var_mean(rows, dim=-1, keepdim=True, correction=0)
    y = ((rows - mean) * torch.rsqrt(var + eps)).view(x.shape)
    if weight is not None:
        y = y * weight.float().view(1, -1, *tail)
    if bias is not None:
        y = y + bias.float().view(1, -1, *tail)
    return (y * torch.sigmoid(y) if silu else y).to(x.dtype)
