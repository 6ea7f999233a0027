"""Returns the same memory from every call: each call overwrites the previous result."""

import torch
import torch.nn.functional as F

BUFFERS: dict = {}


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    out = BUFFERS.setdefault((gate.shape, x.dtype), torch.empty(gate.shape, dtype=x.dtype))
    return torch.mul(F.silu(gate), up, out=out)
