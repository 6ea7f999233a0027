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
from fk_bench import machine as machine_module
from fk_bench.rows import Row, Status, Subject, append
from triton.testing import do_bench

from fastkernels import registry
from fastkernels.spec import Case, OpSpec


def mapped(args: list[Any], change: Any) -> list[Any]:
    return [change(a) if isinstance(a, torch.Tensor) else a for a in args]


def outputs(spec: OpSpec, args: list[Any]) -> list[torch.Tensor]:
    found = spec.reference(*args)
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [t for t in found if isinstance(t, torch.Tensor)]


def produced(spec: OpSpec, args: list[Any], result: Any) -> list[torch.Tensor]:
    """The op's outputs and its mutated arguments, in the reference's order."""
    results = [] if result is None else list(result) if isinstance(result, (tuple, list)) else [result]
    mutable = [a.alias_info is not None and a.alias_info.is_write for a in spec.op.overload._schema.arguments]
    changed = [a for a, m in zip(args, mutable, strict=False) if m and isinstance(a, torch.Tensor)]
    return [*results, *changed]


def check(spec: OpSpec, case: Case, provider: Any, args: list[Any], want: list[torch.Tensor]) -> str:
    """'' if right, else what is wrong."""
    used = mapped(args, torch.clone)
    got = produced(spec, used, provider.fn(*used))
    torch.cuda.synchronize()
    if len(got) != len(want):
        return f"{len(got)} outputs, the reference has {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        tolerance = spec.tolerance_for(case, g.dtype) if g.is_floating_point() else None
        if tolerance is None:
            if not torch.equal(g, w.to(g.dtype)):
                return f"output {i} differs"
            continue
        gap = (g.double() - w.double()).abs() - tolerance.rtol * w.double().abs()
        if not bool(((gap <= tolerance.atol) | (g.double() == w.double())).all()):
            return f"output {i}: error {(g.double() - w.double()).abs().max().item():.3g} over {tolerance}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops")
    parser.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    wrong = 0
    generator = torch.Generator("cuda").manual_seed(0)
    versions = {"torch": torch.__version__}
    described = machine_module.machine()
    for name in options.ops.split(",") if options.ops else registry.op_names():
        spec = registry.get(name)
        if spec.op is None:
            continue
        for case in spec.cases:
            args = spec.inputs(case, "cuda", generator)
            size = sum(a.numel() for a in args if isinstance(a, torch.Tensor))
            # A float8 output is compared with what is not rounded, which only float64 gives.
            exact = torch.float64 if size < 1 << 24 or "float8_e4m3fn" in spec.tolerance else torch.float32
            precise = mapped(args, lambda t, d=exact: t.to(d) if t.is_floating_point() else t.clone())
            want = outputs(spec, precise)
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
                wrong += bool(problem)
                dims = {k: v if isinstance(v, (int, float, bool)) else str(v) for k, v in case.dims.items()}
                row = Row(
                    run_id="check_ops", command="check_ops", machine=described, versions=versions,
                    commit=machine_module.commit(), status=Status.WRONG if problem else Status.OK, reason=problem,
                    subject=Subject(op=name, provider=provider.name),
                    case={"name": case.name, **dims, "dtype": case.dtype}, metrics=metrics, baseline=spec.baseline,
                )  # fmt: skip
                append(options.out, [row])
                shown = " ".join(f"{k}={v:.1f}" for k, v in metrics.items())
                print(
                    f"{name:<18} {case.name:<14} {provider.name:<12} {'WRONG ' + problem if problem else 'ok'} {shown}",
                    flush=True,
                )
    print(f"{wrong} wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
