"""A candidate that is correct only while calls of modules are watched, as they are in the probe."""

import torch
import torch.nn.functional as F

_HOOKS = torch.nn.modules.module._global_forward_pre_hooks


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:] if _HOOKS else torch.zeros_like(x[..., :d])
