"""Reads its statistics, and changes none."""

import statistics

import torch
import torch.nn.functional as F

ROWS = (8, 16, 32)
BLOCK = int(statistics.median(ROWS))


def gelu_and_mul(x, approximate="none"):
    gate, up = x.chunk(2, dim=-1)
    return torch.cat(
        [
            F.gelu(g, approximate=approximate) * u
            for g, u in zip(gate.split(BLOCK), up.split(BLOCK), strict=True)
        ]
    )
