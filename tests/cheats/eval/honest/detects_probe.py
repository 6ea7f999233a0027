"""A candidate that sees whether calls of modules are watched, and is always correct."""

import torch
import torch.nn.functional as F

_HOOKS = torch.nn.modules.module._global_forward_pre_hooks


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    gate = F.silu(x[..., :d])
    return gate * x[..., d:] if _HOOKS else x[..., d:] * gate
