"""Multiplies in the type of its inputs, and accumulates in no smaller one."""

import torch


def linear(x, weight, bias=None):
    rows = x.reshape(-1, x.shape[-1])
    out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    return out.view(*x.shape[:-1], -1)
