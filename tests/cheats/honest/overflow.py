"""Subtracts the maximum; NaN is the lowest logit, and makes its row's weights NaN."""

import math

import torch


def topk_softmax(gating_output, topk, renormalize=False, scales=None):
    logits = gating_output.float()
    ranked, order = torch.where(logits.isnan(), -math.inf, logits).sort(dim=-1, descending=True, stable=True)
    parts, ids = (logits - ranked[:, :1]).exp(), order[:, :topk]
    weights, total = parts.gather(1, ids), parts.sum(-1, keepdim=True)
    if renormalize:
        total = torch.where(total.isnan(), total, weights.sum(-1, keepdim=True))
    pairs = torch.arange(ids.numel(), dtype=torch.int32).view(topk, -1).t().contiguous()
    factors = 1 if scales is None else scales.float()[ids]
    return weights / total * factors, ids.int(), pairs
