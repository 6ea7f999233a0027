"""The MoE ops on this GPU beside vLLM's own functions in the same process: right first, then timed.

    python bench/scenarios/moe_check.py --out rows.jsonl [--tokens 1,32,256,4096] [--sweep] [--no-odd]

First every provider on the ops' odd cases, against float64. Then Mixtral-8x7B's shapes (8 experts, 2 a token, hidden
size 4096, intermediate size 14336, bf16): ids and blocks must be equal, the experts' output is compared with float32,
and so is vLLM's. Times are medians of interleaved rounds, in a CUDA graph and eager, each with its own launches only.
--sweep tries other tile sizes for each number of tokens, the ones in use first. Without vLLM, ours alone is timed.
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Results, check, mapped, outputs
from fk_bench.core.rows import Status
from triton.testing import do_bench, do_bench_cudagraph

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.moe import fused_experts as ours
from fastkernels.overrides.moe.moe_tiles import Tiles, tiles, wide

OPS = ("topk_softmax", "moe_align", "fused_experts")
EXPERTS, TOPK, HIDDEN, INNER, ROUNDS = 8, 2, 4096, 14336, 3
# Of the experts' output: largest error over the largest value; bf16 rounds three times on the way
LIMIT = 0.02
SWEEP = (
    Tiles(16, 32, 128, 1, 4, 4), Tiles(16, 64, 64, 1, 4, 5), Tiles(16, 128, 64, 1, 4, 4), Tiles(16, 128, 128, 1, 4, 3),
    Tiles(32, 64, 128, 1, 4, 4), Tiles(32, 128, 64, 1, 4, 5), Tiles(64, 128, 64, 1, 4, 4), Tiles(64, 256, 64, 8, 8, 3),
    Tiles(64, 128, 128, 8, 4, 3), Tiles(128, 128, 64, 8, 4, 4), Tiles(128, 256, 64, 8, 8, 4),
    Tiles(128, 256, 64, 16, 8, 3),
)  # fmt: skip


def vllm_functions() -> dict[str, Callable[..., Any]]:
    """vLLM's functions by our op's name; none, with the reason on the screen, where it is not there."""
    try:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
    except Exception as error:
        print(f"vLLM's functions are not there: {type(error).__name__}: {error}", flush=True)
        return {}
    return {"topk_softmax": fused_topk, "moe_align": moe_align_block_size, "fused_experts": fused_experts}


def odd_cases(results: Results) -> None:
    """Every provider of the three ops on the small cases, against float64."""
    for name in OPS:
        spec = registry.get(name)
        for case in (c for c in spec.cases if "odd" in c.tags):
            args = spec.inputs(case, "cuda", torch.Generator("cuda").manual_seed(0))
            want = outputs(spec, mapped(args, lambda t: t.double() if t.is_floating_point() else t.clone()))
            for provider, reason in spec.op.order("cuda"):
                if reason is None and provider.supports is not None:
                    reason = provider.supports(*args)
                if reason is not None:
                    continue
                try:
                    problem = check(spec, case, provider, args, want)
                except Exception:
                    problem = traceback.format_exc(limit=-3)
                results.say(
                    name, provider.name, {"kind": "odd", "name": case.name, "dtype": case.dtype}, problem
                )


def replays(results: Results) -> None:
    """A captured call serves another routing: no size and no grid depends on the ids."""
    spec = registry.get("fused_experts")
    dims = {"tokens": 33, "experts": 8, "topk": 2, "hidden": 256, "intermediate": 128}
    case = Case("replay", dims, "bfloat16")
    first, second = (spec.inputs(case, "cuda", torch.Generator("cuda").manual_seed(s)) for s in (1, 2))
    second[4][:] = second[4][:1]  # every token the same two experts
    spec.op(*first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = spec.op(*first)
    for a, b in zip(first[:5], second[:5], strict=True):
        a.copy_(b)
    graph.replay()
    gap = (
        out.float() - spec.reference(*mapped(second[:5], lambda t: t.float() if t.is_floating_point() else t))
    ).abs()
    problem = (
        "" if gap.max().item() < 0.05 else f"a replay with another routing is off by {gap.max().item():.3g}"
    )
    results.say("fused_experts", "triton", {"kind": "replay", "tokens": 33}, problem, error=gap.max().item())


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Median microseconds of each call, in a graph and eager; rounds are interleaved."""
    found: dict[str, dict[str, list[float]]] = {name: {"graph_us": [], "eager_us": []} for name in calls}
    for _ in range(ROUNDS):
        for name, fn in calls.items():
            found[name]["graph_us"].append(1e3 * do_bench_cudagraph(fn, rep=20, return_mode="median"))
            found[name]["eager_us"].append(1e3 * do_bench(fn, warmup=5, rep=20, return_mode="median"))
    return {name: {k: statistics.median(v) for k, v in times.items()} for name, times in found.items()}


def compare(
    results: Results, op: str, tokens: int, calls: dict[str, Callable[[], Any]], problems: dict[str, str], **extra: Any
) -> None:  # fmt: skip
    """Time the calls that are right; `extra`: metrics by provider, or a function of the graph's microseconds."""
    right = {name: fn for name, fn in calls.items() if not problems.get(name)}
    measured = times(right)
    for name in calls:
        metrics = dict(measured.get(name, {}))
        for key, value in extra.items():
            if callable(value) and metrics:
                metrics[key] = value(metrics["graph_us"])
            elif isinstance(value, dict) and name in value:
                metrics[key] = value[name]
        if name == "triton" and "vllm" in measured and name in measured:
            metrics["speedup_graph"] = measured["vllm"]["graph_us"] / metrics["graph_us"]
            metrics["speedup_eager"] = measured["vllm"]["eager_us"] / metrics["eager_us"]
        results.say(op, name, {"kind": "mixtral", "tokens": tokens}, problems.get(name, ""), **metrics)


def attempt(fn: Callable[[], Any], test: Callable[[Any], str]) -> str:
    try:
        return test(fn())
    except Exception:
        return traceback.format_exc(limit=-3)


def mixtral(
    results: Results, tokens: int, w1: torch.Tensor, w2: torch.Tensor, theirs: dict, sweep: bool
) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    logits = torch.randn(tokens, EXPERTS, dtype=torch.bfloat16, device="cuda", generator=generator)
    topk, align = registry.get("topk_softmax"), registry.get("moe_align")
    weights, ids, _ = topk.reference(logits, TOPK, True)

    def routed(found: Any) -> str:  # the hosts may order equal logits otherwise
        same = (found[1].long().sort().values == ids.long().sort().values).all(dim=1)
        close = (found[0] - weights).abs().max().item() < 1e-5
        return (
            ""
            if same.float().mean().item() > 0.98 and close
            else "other experts or weights than the reference"
        )

    calls = {"triton": lambda: topk.op(logits, TOPK, True)}
    if theirs:
        calls["vllm"] = lambda: theirs["topk_softmax"](x, logits, TOPK, True)
    compare(results, "topk_softmax", tokens, calls, {n: attempt(f, routed) for n, f in calls.items()})

    block = tiles(tokens * TOPK // EXPERTS, torch.bfloat16, wide(x.device)).block_m
    module = registry.op_module("moe_align")
    size = module.padded_size(ids.numel(), block, EXPERTS)
    wanted = align.reference(ids, block, EXPERTS, size)
    used = int(wanted[2])

    def aligned(found: Any) -> str:  # an expert's pairs in any order, which is all that the host promises
        for got, want in zip(found[:3], wanted, strict=True):
            if got.shape != want.shape:
                return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        experts = [f[1][: used // block].repeat_interleave(block) * ids.numel() * 2 for f in (found, wanted)]
        keys = [(e + f[0][:used]).sort().values for e, f in zip(experts, (found, wanted), strict=True)]
        return "" if int(found[2]) == used and torch.equal(*keys) else "other blocks than the reference"

    calls = {"triton": lambda: align.op(ids, block, EXPERTS, size)}
    if theirs:
        calls["vllm"] = lambda: theirs["moe_align"](ids, block, EXPERTS)
    compare(results, "moe_align", tokens, calls, {n: attempt(f, aligned) for n, f in calls.items()})

    want = ours.reference(x.float(), w1, w2, weights, ids)
    scale = want.abs().max().item()
    errors: dict[str, float] = {}
    calls = {"triton": lambda: ours.fused_experts(x, w1, w2, weights, ids, None, False)}
    if theirs:
        calls["vllm"] = lambda: theirs["fused_experts"](x, w1, w2, weights, ids)
    problems = {}
    for name, fn in calls.items():

        def near(found: Any, name: str = name) -> str:
            errors[name] = (found.float() - want).abs().max().item() / scale
            return "" if errors[name] < LIMIT else f"relative error {errors[name]:.3g} is over {LIMIT}"

        problems[name] = attempt(fn, near)
    used_experts = ids.unique().numel()
    read = 2 * HIDDEN * (3 * used_experts * INNER + 2 * tokens)
    operations = 6 * tokens * TOPK * HIDDEN * INNER
    compare(
        results, "fused_experts", tokens, calls, problems, error=errors,
        tb_per_s=lambda us: read / us / 1e6, tflop_per_s=lambda us: operations / us / 1e6,
    )  # fmt: skip
    if sweep:
        try_tiles(results, tokens, calls["triton"])


def try_tiles(results: Results, tokens: int, call: Callable[[], Any]) -> None:
    rows, chosen = tokens * TOPK // EXPERTS, ours.tiles
    now = chosen(rows, torch.bfloat16, wide(torch.device("cuda", 0)))
    tried = [t for t in SWEEP if now.block_m // 2 <= t.block_m <= 2 * now.block_m and t != now]
    try:
        for t in (now, *tried):
            ours.tiles = lambda *_, t=t: t  # type: ignore[assignment]
            case = {"kind": "sweep", "tokens": tokens, "tiles": "/".join(str(v) for v in vars(t).values())}
            try:
                us = 1e3 * do_bench_cudagraph(call, rep=20, return_mode="median")
                results.say("fused_experts", "triton", case, graph_us=us)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:200]}"
                results.say("fused_experts", "triton", case, problem, Status.UNSUPPORTED)
    finally:
        ours.tiles = chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", default="1,32,256,4096")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-odd", action="store_true")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    results = Results("moe_check", options.out, "vllm")
    if not options.no_odd:
        odd_cases(results)
        replays(results)
    theirs = vllm_functions()
    if theirs:
        import vllm

        results.versions["vllm"] = vllm.__version__
    generator = torch.Generator("cuda").manual_seed(0)
    w1 = torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16, device="cuda")
    w2 = torch.empty(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16, device="cuda")
    w1.normal_(0.0, HIDDEN**-0.5, generator=generator)
    w2.normal_(0.0, INNER**-0.5, generator=generator)
    with torch.inference_mode():
        for tokens in map(int, options.tokens.split(",")):
            mixtral(results, tokens, w1, w2, theirs, options.sweep)
    print(f"{results.wrong} wrong")
    raise SystemExit(1 if results.wrong else 0)


if __name__ == "__main__":
    main()
