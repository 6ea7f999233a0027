"""A class that overwrites its activation, which the host's own class leaves alone."""

import torch
import torch.nn.functional as F


class VllmSiluAndMul(torch.nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        out = F.silu(gate) * up
        x.zero_()
        return out
