"""Reads its arguments only."""

import torch
import torch.nn.functional as F


def layer_norm(x, weight, bias, eps):
    parameters = [None if t is None else t.to(torch.float32) for t in (weight, bias)]
    return F.layer_norm(x.float(), x.shape[-1:], *parameters, eps).to(x.dtype)
