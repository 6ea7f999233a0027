"""Baselines of this family: what transformers and ultralytics run, eager and compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastkernels.core.baseline import Baseline, inductor
from fastkernels.overrides.detection import box_position_bias as placed
from fastkernels.overrides.detection import deformable_attention as sampled
from fastkernels.overrides.detection import dfl_boxes as distances
from fastkernels.overrides.detection import refine_boxes as refined
from fastkernels.overrides.detection import roi_align as pooled
from fastkernels.overrides.kit.libraries import T, from_torch

Ints = Sequence[int]


def _top_k_queries(scores: T, k: int, flat: bool = False) -> tuple[T, T]:
    found = torch.topk(scores.flatten(1) if flat else scores.amax(2), k, dim=1)
    return found.values, found.indices


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "box_position_bias": (*from_torch(placed.reference), inductor("box_position_bias")),
    "deformable_attention": (*from_torch(sampled.reference), inductor("deformable_attention")),
    "dfl_boxes": (*from_torch(distances.reference), inductor("dfl_boxes")),
    "refine_boxes": (*from_torch(refined.reference), inductor("refine_boxes")),
    "roi_align": from_torch(pooled.reference),
    "top_k_queries": from_torch(_top_k_queries, differs="equal scores are in any order", unchecked=(1,)),
}
