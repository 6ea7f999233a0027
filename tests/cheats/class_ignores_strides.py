"""A class that reads its input as if it were contiguous."""

import torch
import torch.nn.functional as F


class VllmSiluAndMul(torch.nn.Module):
    def forward(self, x):
        dense = x if x.numel() == 0 else x.as_strided(x.shape, x.new_empty(x.shape).stride())
        gate, up = dense.chunk(2, dim=-1)
        return F.silu(gate) * up
