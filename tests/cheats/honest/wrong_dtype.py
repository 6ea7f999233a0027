"""Rounds once, at the end."""

import torch.nn.functional as F


def layer_norm(x, weight, bias, eps):
    parameters = [None if t is None else t.float() for t in (weight, bias)]
    out = F.layer_norm(x.float(), x.shape[-1:], *parameters, eps)
    return out.to(x.dtype)
