"""Computes blocks of rows on the threads that it was given."""

import torch
import torch.nn.functional as F


def silu_and_mul(x):
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    for block, rows in zip(x.split(16), out.split(16), strict=True):
        gate, up = block.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=rows)
    return out
