"""Calls torch's registered op of the same name, whatever runs it."""

import torch


def silu_and_mul(x):
    return torch.ops.fastkernels.silu_and_mul(x)
