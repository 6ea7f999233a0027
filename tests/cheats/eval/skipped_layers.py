"""A candidate that skips all decoder layers."""

import torch
import torch.nn.functional as F

from fastkernels.overrides.block.vllm import VllmLlamaDecoderLayer


def _skipped(self, positions, hidden_states, residual):
    return torch.zeros_like(hidden_states), hidden_states if residual is None else hidden_states + residual


VllmLlamaDecoderLayer.forward = _skipped


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]
