"""Builds Gemma's norm on the host class of another op in the same file."""

import torch

from fastkernels.overrides.norm import vllm


def gemma_rms_norm(x, weight, eps, residual=None):
    h = x.float() if residual is None else x.float() + residual.float()
    module = vllm.VllmRMSNorm(x.shape[-1], eps, dtype=torch.float32)
    module.weight = torch.nn.Parameter(1 + weight.float(), requires_grad=False)
    if residual is not None:
        residual.copy_(h)
    return module(h).to(x.dtype)
