"""Caches the indices of the pairs, which depend on sizes only."""

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def _pairs(tokens: int, topk: int) -> torch.Tensor:
    return torch.arange(tokens * topk, dtype=torch.int32).view(topk, tokens).t().contiguous()


def topk_softmax(gating_output, topk, renormalize=False, scales=None):
    logits = gating_output.float()
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = logits.softmax(-1).gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    weights = weights if scales is None else weights * scales.float()[ids]
    return weights, ids.int(), _pairs(*ids.shape).clone()
