"""Baselines of this family."""

from __future__ import annotations

from fastkernels.core.baseline import Baseline, inductor

BASELINES: dict[str, tuple[Baseline, ...]] = {"lstm": (inductor("lstm"),)}
