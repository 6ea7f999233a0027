"""Norms and activations on this GPU, beside the kernels that production runs.

    python bench/scenarios/leaf_ops.py --out rows.jsonl [--no-time]

check_ops.py with the judge's baselines as further providers: FlashInfer's kernels, vLLM's, SGLang's and torch's, each
where it is installed and takes the case. Some compile at their first call, which is not timed.
"""

from __future__ import annotations

import sys

import check_ops
from fk_bench.judge.baselines import Baseline, baselines

from fastkernels import registry
from fastkernels.dispatch import Provider

NAMES = (
    "rms_norm", "gemma_rms_norm", "layer_norm", "t5_layer_norm", "l2_norm", "silu_and_mul", "gelu_and_mul", "gelu",
    "quick_gelu", "relu2",
)  # fmt: skip


def _provider(baseline: Baseline) -> Provider:
    """Made at the first call, so that one that cannot be made is a row that says so."""
    return Provider(baseline.name, lambda *args: baseline.fn(*args), supports=baseline.supports)


if __name__ == "__main__":
    for name in NAMES:
        op = registry.get(name).op
        found = [b for b in baselines(name, "production", "cuda") if b.kind in ("host", "library")]
        others = [_provider(b) for b in found if b.available() is None]
        op.providers = (*op.providers, *others)
    sys.argv += ["--ops", ",".join(NAMES)]
    check_ops.main()
