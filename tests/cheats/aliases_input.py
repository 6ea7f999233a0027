"""Computes into its input and returns a view of it: the numbers are right, but no memory is allocated."""

import torch.nn.functional as F


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    F.silu(gate, inplace=True)
    return gate.mul_(up)
