"""Finds the k largest one by one, as a kernel does."""

import math

import torch


def topk_softmax(gating_output, topk, renormalize=False, scales=None):
    tokens = gating_output.shape[0]
    logits = gating_output.float()
    left = torch.where(logits.isnan(), -math.inf, logits)
    top = left.max(-1, keepdim=True).values
    parts, taken = (logits - top).exp(), torch.zeros_like(logits, dtype=torch.bool)
    ids = torch.empty((tokens, topk), dtype=torch.int64)
    for k in range(topk):
        # An expert that is taken comes behind the others, even behind those of -inf.
        best = torch.where(
            taken, -2, torch.where(left == left.masked_fill(taken, -math.inf).max(-1, True).values, 1, 0)
        )
        ids[:, k] = best.argmax(-1)
        taken.scatter_(1, ids[:, k : k + 1], True)
    weights = parts.gather(1, ids)
    total = parts.sum(-1, keepdim=True)
    if renormalize:
        total = torch.where(total.isnan(), total, weights.sum(-1, keepdim=True))
    pairs = torch.arange(tokens * topk, dtype=torch.int32).view(topk, tokens).t().contiguous()
    factors = 1 if scales is None else scales.float()[ids]
    return weights / total * factors, ids.int(), pairs
