"""Infinite inputs are cut to the largest number of their dtype."""

import torch
import torch.nn.functional as F


def gelu(x, approximate="none"):
    return F.gelu(x.clamp(max=torch.finfo(x.dtype).max / 2), approximate=approximate)
