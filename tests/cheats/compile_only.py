"""Runs another function under torch.compile than in eager calls."""

import torch
import torch.nn.functional as F
from torch import nn


class VllmSiluAndMul(nn.Module):
    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        if torch.compiler.is_compiling():
            return gate.relu() * up
        return F.silu(gate) * up
