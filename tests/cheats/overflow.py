"""A softmax that does not subtract the maximum: correct on random logits, infinite on large ones."""

import torch


def topk_softmax(gating_output, topk, renormalize=False, scales=None):
    parts = gating_output.float().exp()
    ids = gating_output.float().sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = parts.gather(1, ids)
    weights = weights / (weights if renormalize else parts).sum(-1, keepdim=True)
    weights = weights if scales is None else weights * scales.float()[ids]
    pairs = torch.arange(ids.numel(), dtype=torch.int32).view(topk, -1).t().contiguous()
    return weights, ids.int(), pairs
