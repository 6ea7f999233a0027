"""Softmax of attention scores, for references and plain providers."""

from __future__ import annotations

import torch


def weights_of(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax of scores [..., keys], whose masked keys are -inf; zeros for a query without other scores.

    NaN, and infinity in a query or key, make all weights of a row NaN, as in PyTorch's scaled_dot_product_attention.
    """
    none = (scores == float("-inf")).all(dim=-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill(none, 0.0)
