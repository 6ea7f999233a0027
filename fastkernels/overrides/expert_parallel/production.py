"""Baselines of this family: the parts of each op one after the other, as the hosts run them by default."""

from __future__ import annotations

from functools import partial

from fastkernels.core.baseline import Baseline, provider
from fastkernels.overrides.kit.libraries import GPU_AND_CPU

OPS = (
    "ep_combine",
    "ep_combine_batched",
    "ep_dispatch",
    "ep_dispatch_batched",
    "ep_dispatch_batched_fp8",
    "ep_dispatch_fp8",
)

BASELINES: dict[str, tuple[Baseline, ...]] = {
    op: (Baseline("composed", "host", partial(provider, op, "composed"), devices=GPU_AND_CPU),) for op in OPS
}
