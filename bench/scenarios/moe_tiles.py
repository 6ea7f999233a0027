"""Tile sizes of fused_experts, and both ways of moe_align, beside vLLM's own functions: right first, then timed.

    python bench/scenarios/moe_tiles.py --out rows.jsonl [--seconds 60] [--tokens 1,8,32,64,128,256,512,704]

Mixtral-8x7B's and Qwen3-30B-A3B's experts and a small model's, bf16, random weights, routing of which some experts have
more than others. Compiles all in parallel; each set of sizes is compared with float32 on 64 tokens, moe_align bit for
bit; then calls in CUDA graphs, interleaved, the slope between n and 2n replays. A summary names the fastest of each.
--device cpu --quick runs all of it on tiny shapes, interpreted (TRITON_INTERPRET=1): the times mean nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import moe_align_ways
import torch
from graph_clock import Compiles, Run, finish, measure, poisoned

from fastkernels.overrides.l1 import moe_align
from fastkernels.overrides.l2 import _grouped_gemm, fused_experts
from fastkernels.overrides.l2._grouped_gemm import Tiles, tiles, wide

COMPILE_S, CHECKED, LIMIT = 40, 64, 0.02


class Model(NamedTuple):
    experts: int
    topk: int
    hidden: int
    inner: int


MODELS = {
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
    "qwen3-30b": Model(128, 8, 2048, 768),
    "small": Model(8, 2, 256, 192),
}
TINY = {"tiny": Model(4, 2, 64, 32)}
# block_m, block_n, block_k, group_m, warps, stages
SETS = tuple(Tiles(*sizes) for sizes in (
    (16, 64, 128, 1, 4, 4), (16, 64, 64, 1, 4, 5), (16, 128, 128, 1, 4, 3), (16, 64, 256, 1, 4, 3),
    (16, 64, 128, 8, 4, 4), (32, 64, 128, 8, 4, 4), (32, 128, 128, 16, 4, 3), (64, 128, 64, 8, 4, 3),
    (64, 128, 64, 8, 4, 4), (64, 128, 128, 8, 8, 4), (64, 128, 128, 8, 4, 3), (64, 256, 64, 8, 8, 4),
    (128, 128, 64, 8, 8, 4), (128, 256, 64, 8, 8, 3), (128, 256, 64, 8, 8, 4), (128, 256, 64, 16, 8, 4),
))  # fmt: skip
SMALL_AT = 704  # tokens at which the small model is timed: where vLLM's is faster


def label(t: Tiles) -> str:
    return "/".join(str(v) for v in vars(t).values())


def sets_for(model: Model, tokens: int) -> list[Tiles]:
    """What is in use for so many tokens, then those worth trying."""
    rows, cuda = tokens * model.topk // model.experts, torch.cuda.is_available()
    now = tiles(rows, torch.bfloat16 if cuda else torch.float32, cuda and wide(torch.device("cuda", 0)))
    least, most = (16, 16) if rows <= 4 else (16, 64) if rows <= 32 else (64, 128)
    return [now, *(t for t in SETS if cuda and least <= t.block_m <= most and t != now)]


def tokens_of(name: str, tokens: list[int]) -> list[int]:
    return [n for n in tokens if name != "small" or n == SMALL_AT]


@contextlib.contextmanager
def using(t: Tiles) -> Iterator[None]:
    chosen = fused_experts.tiles
    fused_experts.tiles = lambda *_: t  # type: ignore[assignment]
    try:
        yield
    finally:
        fused_experts.tiles = chosen


def ours(t: Tiles, *args: Any) -> torch.Tensor:
    with using(t):
        return fused_experts._triton(*args)


def theirs() -> dict[str, Callable[..., Any]]:
    """vLLM's functions by our op's name; none, with the reason on the screen, where it is not there."""
    try:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts as experts
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    except Exception as error:
        print(f"vLLM's functions are not there: {type(error).__name__}: {error}", flush=True)
        return {}
    return {"fused_experts": experts, "moe_align": moe_align_block_size}


def routing(run: Run, tokens: int, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids): the hottest of 8 experts has 1.5 times the mean load, that of 128 some 2.5 times."""
    bias = torch.linspace(-0.6, 0.6, model.experts, device=run.device)
    logits = torch.randn(tokens, model.experts, generator=run.generator, device=run.device) + bias
    weights, ids = logits.softmax(-1).topk(model.topk)
    return weights / weights.sum(-1, keepdim=True), ids.int()


# -- compiling


def shapes(model: Model) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    return (model.experts, 2 * model.inner, model.hidden), (model.experts, model.hidden, model.inner)


def compile_share(part: int, parts: int, tokens: list[int]) -> None:
    """Every `parts`-th pair of a model and sizes, for all numbers of tokens: most share their kernels."""
    _grouped_gemm._grouped_gemm_kernel = Compiles(_grouped_gemm._grouped_gemm_kernel)
    jobs: dict[tuple[Model, Tiles], list[int]] = {}
    for name, model in MODELS.items():
        for n in tokens_of(name, tokens):
            for t in sets_for(model, n):
                jobs.setdefault((model, t), []).append(n)
    moe_align_ways.compile_share(part, parts)
    for (model, t), counts in list(jobs.items())[part::parts]:
        for n in counts:
            with contextlib.suppress(Exception):  # said where it is run
                compile_one(model, t, n)


def compile_one(model: Model, t: Tiles, tokens: int) -> None:
    pairs = tokens * model.topk
    capacity = -(-moe_align.padded_size(pairs, t.block_m, model.experts) // t.block_m) * t.block_m
    sorted_ids, expert_ids, total = (
        torch.empty(size, dtype=torch.int32, device="meta") for size in (capacity, capacity // t.block_m, 1)
    )
    scale = torch.empty(tokens, model.topk, device="meta")
    for shape, rows, topk, late in zip(
        shapes(model), (tokens, pairs), (model.topk, 1), (None, scale), strict=True
    ):
        weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        a = torch.empty(rows, shape[2], dtype=torch.bfloat16, device="meta")
        _grouped_gemm.grouped_gemm(a, weight, (sorted_ids, expert_ids, total), pairs, topk, late, t)


def compile_theirs(part: int, parts: int, tokens: list[int], run: Run) -> None:
    """Real calls, on weights that nobody wrote."""
    found = theirs()
    for name, model in MODELS.items() if found else ():
        w1, w2 = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes(model))
        for n in tokens_of(name, tokens)[part::parts]:
            with contextlib.suppress(Exception):
                found["fused_experts"](run.randn(n, model.hidden), w1, w2, *routing(run, n, model))
    torch.cuda.synchronize()


def compiling(tokens: str) -> list[subprocess.Popen[bytes]]:
    cores = max(1, (os.cpu_count() or 2) - 1)
    others = min(4, cores)
    shares = [f"theirs/{i}/{others}" for i in range(others)] + [f"ours/{i}/{cores}" for i in range(cores)]
    command = [sys.executable, __file__, "--out", os.devnull, "--tokens", tokens, "--compile"]
    return [subprocess.Popen([*command, share]) for share in shares]


# -- right, and how fast


def wrong_by(
    call: Callable[..., torch.Tensor], args: list[torch.Tensor], want: torch.Tensor, at: torch.Tensor
) -> str:
    try:
        with poisoned():
            found = call(*args)[at].float()
        error = ((found - want).abs().max() / want.abs().max()).item()
        return "" if error < LIMIT else f"relative error {error:.3g} is over {LIMIT}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def time_experts(
    run: Run, name: str, model: Model, weights: list[torch.Tensor], tokens: int, vllm: Any
) -> None:
    dtype = weights[0].dtype
    x, (scale, ids) = run.randn(tokens, model.hidden, dtype=dtype), routing(run, tokens, model)
    at = torch.linspace(0, tokens - 1, min(tokens, CHECKED), device=run.device).long()
    want = fused_experts.reference(x[at].float(), weights[0], weights[1], scale[at], ids[at])
    args = [x, *weights, scale, ids]
    sets = sets_for(model, tokens)
    calls: dict[str, Callable[..., torch.Tensor]] = {label(t): partial(ours, t) for t in sets}
    calls |= {"vllm": vllm} if vllm else {}
    for which in list(calls):
        if reason := wrong_by(calls[which], args, want, at):
            status = "unsupported" if "OutOfResources" in reason else ""
            run.row("check", "tiles", {"model": name, "tokens": tokens, "tiles": which}, reason, status)
            del calls[which]
    times = measure(run, {which: [partial(call, *args)] for which, call in calls.items()})
    for which, us in times.items():
        case = {"model": name, "tokens": tokens, "tiles": which, "now": which == label(sets[0])}
        run.row("time", "vllm" if which == "vllm" else "triton", case, us=us, quiet=True)
    best = sorted((w for w in times if w != "vllm"), key=times.__getitem__)[:3]
    said = [f"{w} {times[w]:.1f}" for w in (label(sets[0]), *best, "vllm") if w in times]
    run.summary.append(f"{name:<13} {tokens:>4} tokens  now " + "  ".join(said))
    print(run.summary[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", default="128,256,1,704,32,64,512,8", help="the most wanted first")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few sets")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # what its own children are told
    options = parser.parse_args()
    tokens = [5] if options.quick else [int(n) for n in options.tokens.split(",")]
    begin, run = time.monotonic(), Run("moe_tiles", "fused_experts", options)
    run.common["baseline"] = "vllm"
    if options.compile:
        who, part, parts = options.compile.split("/")
        if who == "ours":
            return compile_share(int(part), int(parts), tokens)
        return compile_theirs(int(part), int(parts), tokens, run)
    with torch.inference_mode():
        workers = compiling(options.tokens) if run.cuda and not run.quick else []
        vllm = theirs() if run.cuda else {}
        finish(workers, COMPILE_S)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        moe_align_ways.time_all(run, vllm.get("moe_align"))
        run.op = "fused_experts"
        for name, model in (TINY if run.quick else MODELS).items():
            weights = [
                run.randn(
                    *shape, dtype=torch.float32 if run.quick else torch.bfloat16, scale=shape[2] ** -0.5
                )
                for shape in shapes(model)
            ]
            for n in tokens_of(name, tokens):
                if run.left() > 0:
                    time_experts(run, name, model, weights, n, vllm.get("fused_experts"))
            del weights
    print("\n".join(["", *run.summary, f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
