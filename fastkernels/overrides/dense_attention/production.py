"""Baselines of dense attention: the formulas of production's layers, eager and compiled."""

from __future__ import annotations

import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, inductor
from fastkernels.overrides.dense_attention.window_attention import MOST_SCALE
from fastkernels.overrides.kit.libraries import T, from_torch


def _window_attention(q: T, k: T, v: T, logit_scale: T, bias: T, mask: T | None = None) -> T:
    """timm's WindowAttention between its linear layers."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * logit_scale.clamp(max=MOST_SCALE).exp()[:, None, None] + bias
    if mask is not None:
        scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()


def _grid_bias_attention(q: T, k: T, v: T, row_bias: T, column_bias: T, scale: float) -> T:
    """transformers' Sam3Attention between its linear layers, with the table that Sam3DetrDecoder makes."""
    table = (row_bias[..., :, None] + column_bias[..., None, :]).flatten(3)
    mask = F.pad(table, (0, 0, q.shape[1] - table.shape[2], 0))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    found = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return found.transpose(1, 2).contiguous()


_ROUNDED = "it rounds scores, of up to 100 and more, to the inputs' dtype"

BASELINES: dict[str, tuple[Baseline, ...]] = {
    "grid_bias_attention": (*from_torch(_grid_bias_attention), inductor("grid_bias_attention")),
    "window_attention": (
        *from_torch(_window_attention, differs=_ROUNDED, unchecked=(0,)),
        inductor("window_attention"),
    ),
}
