"""Calls our op through its family's class for a host."""

import torch

from fastkernels.overrides.norm import vllm


def gemma_rms_norm(x, weight, eps, residual=None):
    module = vllm.VllmGemmaRMSNorm(x.shape[-1], eps)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    out = module(x, residual)
    return out if residual is None else out[0]
