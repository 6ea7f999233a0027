"""A class that derives a packed weight whenever weights were loaded."""

import torch
from torch import nn


class VllmRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None, has_weight=True, dtype=None):
        super().__init__()
        self.variance_epsilon, self.has_weight = eps, has_weight
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
        weight = torch.ones(hidden_size, dtype=dtype or torch.get_default_dtype())
        self.weight = nn.Parameter(weight) if has_weight else weight

    def prepare(self):
        self.wide = self.weight.detach().float().clone()

    def forward(self, x, residual=None):
        from fastkernels.overrides.norm.rms_norm import reference

        weight = self.wide.to(x.dtype) if self.has_weight else None
        out, summed = reference(x, weight, self.variance_epsilon, residual, self.variance_size_override)
        if residual is not None:
            residual.copy_(summed)
        return out if residual is None else (out, residual)
