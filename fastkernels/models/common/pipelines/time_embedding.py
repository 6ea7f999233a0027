"""The MLP that embeds the time of a denoising step, the scale of guidance or a vector of the prompt."""

from __future__ import annotations

import torch
from torch import nn


class TimeMlp(nn.Module):
    """Two linear layers with SiLU between them: [B, C] to [B, H]."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(channels, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(nn.functional.silu(self.linear_1(x)))
