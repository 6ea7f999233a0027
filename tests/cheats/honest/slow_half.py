"""Takes the same time in every call."""

import torch
import torch.nn.functional as F


def silu_and_mul(x):
    d = x.shape[-1] // 2
    return torch.mul(F.silu(x.narrow(-1, 0, d)), x.narrow(-1, d, d))
