"""A candidate that copies the parameters of requests, and changes nothing."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from fastkernels import LLM

_generate = LLM.generate


def _same(self, prompts, sampling_params=None, **more):
    return _generate(self, prompts, [replace(p, max_tokens=p.max_tokens) for p in sampling_params], **more)


LLM.generate = _same


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]
