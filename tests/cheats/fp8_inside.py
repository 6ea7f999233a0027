"""Rounds both matrices to fp8 first: half the bytes, and three bits of fraction."""

import torch


def linear(x, weight, bias=None):
    a, b = (t.to(torch.float8_e4m3fn).to(x.dtype) for t in (x, weight))
    out = a @ b.t()
    return out if bias is None else out + bias
