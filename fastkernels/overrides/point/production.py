"""Baselines of this family: PyTorch's functions and compiler. spconv has no function with these arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, inductor
from fastkernels.overrides.kit.libraries import T, from_torch
from fastkernels.overrides.point import serialize_points


def _gathered(x: T, weight: T, neighbors: T, bias: T | None = None) -> T:
    """All neighbors of a cell side by side, and one product."""
    rows = torch.cat((x, x.new_zeros(1, x.shape[1])))
    at = torch.where((neighbors >= 0) & (neighbors < len(x)), neighbors, len(x)).long()
    return F.linear(rows[at.t()].flatten(1), weight.flatten(1), bias)


def _segments(x: T, offsets: T, indices: T | None = None, reduce: str = "max") -> T:
    rows = x if indices is None else x[indices]
    found = torch.segment_reduce(rows.float(), reduce, offsets=offsets, axis=0)
    return found.masked_fill((offsets.diff() == 0)[:, None], 0).to(x.dtype)


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "serialize_points": (*from_torch(serialize_points.by_masks), inductor("serialize_points")),
    "subm_conv3d": (*from_torch(_gathered), inductor("subm_conv3d")),
    "segment_reduce": from_torch(_segments),
}
