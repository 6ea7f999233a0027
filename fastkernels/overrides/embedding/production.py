"""Production's kernels for the ops of this family, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, inductor
from fastkernels.overrides.kit.libraries import T, from_blas, from_torch


def _logits(
    hidden: T, weight: T, bias: T | None = None, scale: float = 1.0, soft_cap: float | None = None,
    scale_first: bool = False, float32: bool = False,
) -> T:  # fmt: skip
    logits = F.linear(hidden, weight, bias)
    if float32:
        logits = logits.float()
    if scale_first and scale != 1.0:
        logits = logits * scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits if scale_first or scale == 1.0 else logits * scale


def _embedding(input_ids: T, weight: T, *_: Any) -> T:
    return F.embedding(input_ids, weight)


def _no_embedding(input_ids: T, weight: T, org_start: int = 0, org_end: int = -1, *_: Any) -> str | None:
    return None if org_end < 0 else "torch needs more than one kernel for a vocabulary shard"


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "embedding": (
        *from_torch(_embedding, _no_embedding),
        inductor("embedding"),
    ),
    "logits_processor": (*from_blas(_logits),),
}
