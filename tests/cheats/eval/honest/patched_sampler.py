"""A candidate that wraps the sampler, and returns its tokens."""

import torch
import torch.nn.functional as F

from fastkernels.engine.sampling import sampler

_sampling = sampler.sampling


def _same(logits, *rest):
    return _sampling(logits, *rest)


sampler.sampling = _same


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]
