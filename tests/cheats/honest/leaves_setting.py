"""Restores what it changes."""

import torch
import torch.nn.functional as F


def silu_and_mul(x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        one = torch.ones((), device=x.device).to(x.dtype)
    finally:
        torch.set_default_dtype(before)
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:] * one
