"""Calls torch's registered op of the same name, whoever runs it now."""

import torch


def silu_and_mul(x):
    return torch.ops.fastkernels.silu_and_mul(x)
