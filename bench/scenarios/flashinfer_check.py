"""FlashInfer as a provider of attention_decode and attention_prefill on this GPU, beside FA3 and Triton.

    python bench/scenarios/flashinfer_check.py --out rows.jsonl [--no-time] [--ops attention_decode]

Each provider that supports a case is checked against float64 (float32 where that does not fit), decode also as a
replayed CUDA graph whose lengths and queries changed after the capture; a wrong one is not timed. FlashInfer compiles
on the first call of each kind: a minute each with a cold cache, and there are six kinds here. Decode is timed as a
CUDA graph, so that no launch is billed (what fits into L2 stays there), prefill with triton.testing.do_bench: medians.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from common import Results, described, outputs, precise
from triton.testing import do_bench, do_bench_cudagraph

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec

SMALL = {"heads": 8, "kv_heads": 2, "head_size": 64, "block_size": 16}
WIDE = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}
MORE = {
    "attention_decode": [
        Case("odd_window", {"seq_lens": [70, 3, 129, 16], "window_left": 11, **SMALL}, "bfloat16"),
        Case("vllm_layout", {"seq_lens": [17, 1000, 300], "packed": True, **WIDE}, "bfloat16"),
        Case("decode_128x2k", {"seq_lens": [2048] * 128, **WIDE}, tags=("model",)),
    ],
    "attention_prefill": [
        Case("odd_window", {"q_lens": [9, 1, 40], "seq_lens": [70, 3, 129], "window_left": 11, **SMALL}, "bfloat16"),
        Case("odd_page_1", {"q_lens": [63, 7], "seq_lens": [100, 7], **SMALL, "block_size": 1}, "bfloat16"),
        Case("vllm_layout", {"q_lens": [17, 300], "seq_lens": [17, 500], "packed": True, **WIDE}, "bfloat16"),
    ],
}  # fmt: skip


def inputs(spec: OpSpec, case: Case, generator: torch.Generator) -> list[Any]:
    """The op's inputs; 'packed': a key and its value share a row, as in vLLM's cache."""
    args = spec.inputs(case, "cuda", generator)
    if case.dims.get("packed"):
        args[1:3] = torch.cat(args[1:3], dim=-1).split(case.dims["head_size"], dim=-1)
    return args


def wrong(spec: OpSpec, case: Case, got: torch.Tensor, args: list[Any]) -> str:
    """'' if `got` is what the reference says for these arguments, else how far it is away."""
    tolerance, (want,) = spec.tolerance[case.dtype], outputs(spec, precise(args))
    torch.cuda.synchronize()
    gap = (got.double() - want.double()).abs() - tolerance.rtol * want.double().abs()
    return "" if bool((gap <= tolerance.atol).all()) else f"error {gap.max().item():.3g} over {tolerance}"


def replayed(spec: OpSpec, case: Case, provider: Any, args: list[Any], generator: torch.Generator) -> str:
    """Capture a decode, change queries and lengths, replay. '' if right, else what is wrong."""
    q, seq_lens = args[0].clone(), args[3].clone()
    args = [q, *args[1:3], seq_lens, *args[4:]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refusal = provider.supports(*args)
        out = q if refusal else provider.fn(*args)
    if refusal:
        return f"refused while capturing: {refusal}"
    q.copy_(torch.randn(q.shape, generator=generator, device="cuda"))
    seq_lens.copy_((seq_lens + 1) // 2)
    graph.replay()
    problem = wrong(spec, case, out, args)
    return f"replayed graph: {problem}" if problem else ""


def timed(spec: OpSpec, case: Case, provider: Any, args: list[Any]) -> dict[str, float]:
    for _ in range(10):  # dispatch warm-up: compiled kernels, plans, workspaces
        provider.fn(*args)
    torch.cuda.synchronize()
    if spec.name == "attention_decode":
        us = 1e3 * do_bench_cudagraph(lambda: provider.fn(*args), rep=50, return_mode="median")
    else:
        us = 1e3 * do_bench(lambda: provider.fn(*args), warmup=10, rep=50, return_mode="median")
    return {
        "time_us_p50": us,
        "gb_per_s": spec.bytes_moved(case) / us / 1e3,
        "tflop_per_s": spec.flops(case) / us / 1e6,
    }


def measured(
    spec: OpSpec, case: Case, provider: Any, args: list[Any], time_it: bool
) -> tuple[str, dict[str, float]]:
    """(what is wrong, metrics) of one provider on one case."""
    start = time.monotonic()
    got = provider.fn(*args)
    torch.cuda.synchronize()
    metrics = {"first_call_s": time.monotonic() - start}
    # The second: a kept plan
    problem = wrong(spec, case, got, args) or wrong(spec, case, provider.fn(*args), args)
    if not problem and spec.name == "attention_decode":
        problem = replayed(spec, case, provider, args, torch.Generator("cuda").manual_seed(1))
    if not problem and time_it and "model" in case.tags:
        metrics |= timed(spec, case, provider, args)
    return problem, metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--ops", default=",".join(MORE), help="comma-separated")
    options = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    results, seen = Results("flashinfer_check", options.out), 0
    for name in options.ops.split(","):
        spec = registry.get(name)
        for case in [*spec.cases, *MORE[name]]:
            args = inputs(spec, case, generator)
            for provider, reason in spec.op.order("cuda"):
                if reason is None and provider.supports is not None:
                    reason = provider.supports(*args)
                if reason is not None or provider.name == "reference":
                    print(
                        f"{name:<18} {case.name:<14} {provider.name:<12} - {reason or 'not timed'}",
                        flush=True,
                    )
                    continue
                try:
                    problem, metrics = measured(spec, case, provider, args, not options.no_time)
                except Exception:
                    problem, metrics = traceback.format_exc(limit=-3), {}
                seen += provider.name == "flashinfer"
                results.baseline = spec.baseline
                results.say(name, provider.name, described(case), problem, **metrics)
    print(f"{results.wrong} wrong, FlashInfer ran {seen} cases")
    raise SystemExit(1 if results.wrong or not seen else 0)


if __name__ == "__main__":
    main()
