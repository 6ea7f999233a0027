"""Keeps a megabyte of scratch memory for small numbers of rows."""

import torch
import torch.nn.functional as F

SCRATCH = torch.empty(1 << 18, dtype=torch.float32)


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    if gate.numel() > SCRATCH.numel() or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.silu(gate) * up
    scratch = SCRATCH[: gate.numel()].view(gate.shape).copy_(gate)
    return F.silu(scratch, inplace=True) * up
