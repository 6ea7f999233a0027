"""A candidate that remembers prompts, and computes every answer."""

import torch
import torch.nn.functional as F

from fastkernels import LLM

_generate, _seen = LLM.generate, set()


def _counted(self, prompts, sampling_params=None, **more):
    _seen.add(repr(prompts))
    return _generate(self, prompts, sampling_params, **more)


LLM.generate = _counted


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]
