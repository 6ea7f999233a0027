"""Prepares what depends on the shape only, and computes in the call."""

import torch.nn.functional as F

SHAPES: dict = {}


def silu_and_mul(x):
    d = SHAPES.setdefault(x.shape, x.shape[-1] // 2)
    return F.silu(x[..., :d]) * x[..., d:]
