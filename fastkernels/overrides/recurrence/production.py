"""Baselines of this family."""

from __future__ import annotations

from fastkernels.core.baseline import Baseline, inductor

BASELINES: dict[str, tuple[Baseline, ...]] = {
    n: (inductor(n),) for n in ("gated_delta_rule", "lstm", "selective_scan")
}
