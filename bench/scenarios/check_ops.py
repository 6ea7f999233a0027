"""Every op on this GPU: each provider against float64, then timed side by side in one run.

    python bench/scenarios/check_ops.py --out rows.jsonl [--ops rms_norm,...]

A provider that is wrong is not timed. Times are triton.testing.do_bench medians (its own L2 flush between calls):
leads for the next step, not yet the judge's.
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path
from typing import Any

import torch
from common import Results, described, mapped, outputs, precise, produced, tolerance
from triton.testing import do_bench

from fastkernels import registry
from fastkernels.spec import Case, OpSpec


def check(spec: OpSpec, case: Case, provider: Any, args: list[Any], want: list[torch.Tensor]) -> str:
    """'' if right, else what is wrong."""
    used = mapped(args, torch.clone)
    got = produced(spec, used, provider.fn(*used))
    torch.cuda.synchronize()
    if len(got) != len(want):
        return f"{len(got)} outputs, the reference has {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if not g.is_floating_point():
            if not torch.equal(g, w.to(g.dtype)):
                return f"output {i} differs"
            continue
        limit = tolerance(spec, case, g)
        gap = (g.double() - w.double()).abs() - limit.rtol * w.double().abs()
        if not bool((gap <= limit.atol).all()):
            return f"output {i}: error {(g.double() - w.double()).abs().max().item():.3g} over {limit}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops")
    parser.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    results = Results("check_ops", options.out)
    generator = torch.Generator("cuda").manual_seed(0)
    for name in options.ops.split(",") if options.ops else registry.op_names():
        spec = registry.get(name)
        if spec.op is None:
            continue
        for case in spec.cases:
            args = spec.inputs(case, "cuda", generator)
            want = outputs(spec, precise(args))
            for provider, reason in spec.op.order("cuda"):
                if reason is None and provider.supports is not None:
                    reason = provider.supports(*args)
                if reason is not None:
                    continue
                try:
                    problem = check(spec, case, provider, args, want)
                    metrics = {}
                    if not problem and not options.no_time and "model" in case.tags:
                        used = mapped(args, torch.clone)
                        us = 1e3 * do_bench(
                            lambda p=provider, a=used: p.fn(*a), warmup=5, rep=25, return_mode="median"
                        )
                        metrics = {"time_us_p50": us, "gb_per_s": spec.bytes_moved(case) / us / 1e3}
                except Exception:
                    problem = traceback.format_exc(limit=-3)
                    metrics = {}
                results.baseline = spec.baseline
                results.say(name, provider.name, described(case), problem, **metrics)
    print(f"{results.wrong} wrong")
    raise SystemExit(1 if results.wrong else 0)


if __name__ == "__main__":
    main()
