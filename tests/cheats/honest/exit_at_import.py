"""Checks its assumptions at import, and raises if they do not hold."""

import torch
import torch.nn.functional as F

if not hasattr(F, "gelu"):
    raise ImportError(f"torch {torch.__version__} has no gelu")


def gelu_and_mul(x, approximate="none"):
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
