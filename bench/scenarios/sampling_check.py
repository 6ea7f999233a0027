"""Sampling on a GPU: our kernel's tokens against the reference's, its distribution, then its time beside others'.

    python bench/scenarios/sampling_check.py --out rows.jsonl [--no-time]

Beside it: vLLM's TopKTopPSampler (its own choice of kernel, with the division by the temperature that it leaves to its
caller), FlashInfer's sampling and PyTorch's sort, where each is installed. Times are triton.testing.do_bench medians
(its own L2 flush between calls), all in one run; a kernel that is wrong is not timed.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from common import Results
from fk_bench.core.rows import Status
from triton.testing import do_bench

from fastkernels.overrides.sampling import sampling as op

VOCAB = 128256
BATCHES = (1, 32, 256)
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}
DRAWS = 100_000


class Samples(Results):
    """Rows of the one op."""

    def __init__(self, out: Path):
        super().__init__("sampling_check", out, "vllm")
        for name in ("triton", "vllm", "flashinfer-python"):
            with suppress(PackageNotFoundError):
                self.versions[name] = version(name)

    def sampled(
        self, provider: str, case: dict[str, Any], problem: str = "", skipped: str = "", **metrics: float
    ) -> None:
        self.say(
            "sampling", provider, case, problem or skipped, Status.SKIPPED if skipped else None, **metrics
        )


def arguments(logits: torch.Tensor, seed: int = 0, **fields: float) -> list[torch.Tensor]:
    """The op's arguments: the same parameters for every row, seeds and offsets of its own."""
    rows = torch.arange(len(logits), device=logits.device)
    column = torch.ones(len(logits), device=logits.device)
    return [
        logits, column * fields.get("temperature", 1.0), (column * fields.get("top_k", 0)).int(),
        column * fields.get("top_p", 1.0), column * fields.get("min_p", 0.0), rows * 7919 + seed, rows + seed,
    ]  # fmt: skip


def random_logits(rows: int, vocab: int, scale: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(rows, vocab, generator=generator, device="cuda")).to(dtype)


def check_tokens(results: Samples) -> None:
    """The same tokens as the float64 reference on the CPU; a few in ten thousand may differ by a rounded near-tie."""
    fields: list[dict[str, float]] = [
        {}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 50}, {"top_k": 5000}, {"top_p": 0.9},
        {"top_p": 0.999}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.8}, {"top_k": 6000, "top_p": 0.5, "min_p": 0.01},
    ]  # fmt: skip
    for vocab in (7, 1000, 49152, VOCAB, 262144):
        for dtype, scale in ((torch.float32, 3.0), (torch.bfloat16, 3.0), (torch.float32, 0.2)):
            different, first, rows = 0, "", 8
            for i, each in enumerate(fields):
                args = arguments(random_logits(rows, vocab, scale, dtype, i), 100 * i, **each)
                got = op._triton(*args).cpu()
                want = op.reference(*(a.cpu().double() if a.is_floating_point() else a.cpu() for a in args))
                if not torch.equal(got, want):
                    different += int((got != want).sum())
                    first = first or f"{each}: {got.tolist()} instead of {want.tolist()}"
            problem = first if different > 1 else ""
            case = {
                "kind": "tokens",
                "vocab": vocab,
                "dtype": str(dtype).removeprefix("torch."),
                "scale": scale,
            }
            results.sampled("triton", case, problem, rows=rows * len(fields), different=different)


def check_strange(results: Samples) -> None:
    """Rows of -inf, NaN and infinities, ties of a whole row, and a replayed CUDA graph."""
    logits = random_logits(6, 50000, 3.0, torch.float32)
    logits[0], logits[1], logits[2] = -torch.inf, torch.nan, 0.0
    logits[3, 5], logits[4, ::2] = torch.inf, -torch.inf
    for each in ({}, {"top_k": 3, "top_p": 0.9}, {"top_p": 0.5, "min_p": 0.1}, {"temperature": 0.0}):
        args = arguments(logits, **each)
        got, want = op._triton(*args).cpu(), op.reference(*(a.cpu() for a in args))
        problem = "" if torch.equal(got, want) else f"{got.tolist()} instead of {want.tolist()}"
        results.sampled("triton", {"kind": "strange", "fields": str(each)}, problem)
    args = arguments(random_logits(32, VOCAB, 3.0, torch.bfloat16), top_k=50, top_p=0.9)
    op.sampling(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.sampling(*args)
    for seed in (1, 2):
        fresh = arguments(random_logits(32, VOCAB, 3.0, torch.bfloat16, seed), seed, top_k=50, top_p=0.9)
        for a, b in zip(args, fresh, strict=True):
            a.copy_(b)
        graph.replay()
        problem = "" if torch.equal(out, op.sampling(*fresh)) else "a replayed graph gives other tokens"
        results.sampled("triton", {"kind": "graph", "seed": seed}, problem)


def check_distribution(results: Samples) -> None:
    """Chi-square of many draws of one row, over tokens that are expected at least 20 times: 4 sigma fails."""
    for name, each in KINDS.items():
        if name == "greedy":
            continue
        row = random_logits(1, 1000, 2.0, torch.float32, 5)
        drawn = torch.cat(
            [op._triton(*arguments(row.expand(10_000, -1), i, **each)) for i in range(0, DRAWS, 10_000)]
        )
        low = op.threshold(row, *(a[:1] for a in arguments(row, **each)[1:5]))
        kept = torch.where(row >= low, row / each["temperature"], -torch.inf)
        expected = DRAWS * torch.softmax(kept.double(), dim=-1)[0]
        counts = torch.bincount(drawn, minlength=1000)
        cells = expected >= 20
        chi = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
        freedom = int(cells.sum()) - 1
        sigma = (chi - freedom) / max(2 * freedom, 1) ** 0.5
        problem = "draws are not of the distribution" if abs(sigma) > 4 or counts[expected == 0].any() else ""
        results.sampled(
            "triton", {"kind": "distribution", "fields": name}, problem, sigma=sigma, freedom=freedom
        )


def vllm_calls(args: list[torch.Tensor], each: dict[str, float]) -> Callable[[], Any] | None:
    if each["temperature"] == 0:
        return lambda: args[0].argmax(dim=-1)
    module = import_module("vllm.v1.sample.ops.topk_topp_sampler")
    sampler = module.TopKTopPSampler()
    k, p = args[2] if "top_k" in each else None, args[3] if "top_p" in each else None
    return lambda: sampler(args[0].float() / args[1][:, None], {}, k, p)


def flashinfer_calls(args: list[torch.Tensor], each: dict[str, float]) -> Callable[[], Any] | None:
    flashinfer = import_module("flashinfer")
    if each["temperature"] == 0:
        return None
    k, p = args[2], args[3]

    def probs() -> torch.Tensor:
        return torch.softmax(args[0].float() / args[1][:, None], dim=-1)

    if "top_k" in each:
        return lambda: flashinfer.sampling.top_k_top_p_sampling_from_probs(probs(), k, p, deterministic=True)
    if "top_p" in each:
        return lambda: flashinfer.sampling.top_p_sampling_from_probs(probs(), p, deterministic=True)
    return lambda: flashinfer.sampling.sampling_from_probs(probs(), deterministic=True)


def torch_calls(args: list[torch.Tensor], each: dict[str, float]) -> Callable[[], Any] | None:
    if each["temperature"] == 0:
        return lambda: args[0].argmax(dim=-1)

    def draw() -> torch.Tensor:
        logits = args[0].float() / args[1][:, None]
        if "top_k" not in each and "top_p" not in each:
            return (logits.softmax(dim=-1) / torch.empty_like(logits).exponential_()).argmax(dim=-1)
        values, ids = logits.sort(dim=-1, descending=True)
        if "top_k" in each:
            values = values.masked_fill(values < values[:, int(each["top_k"]) - 1, None], -torch.inf)
        probs = values.softmax(dim=-1)
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= args[3][:, None], 0.0)
        return ids.gather(1, (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1, keepdim=True))

    return draw


OTHERS = {"vllm": vllm_calls, "flashinfer": flashinfer_calls, "torch": torch_calls}


def time_all(results: Samples) -> None:
    for rows in BATCHES:
        for name, each in KINDS.items():
            args = arguments(random_logits(rows, VOCAB, 3.0, torch.bfloat16), **each)
            case = {"kind": "time", "rows": rows, "vocab": VOCAB, "fields": name, "dtype": "bfloat16"}
            us = 1e3 * do_bench(lambda a=args: op.sampling(*a), warmup=5, rep=25, return_mode="median")
            results.sampled("triton", case, time_us_p50=us, gb_per_s=args[0].nbytes / us / 1e3)
            for provider, make in OTHERS.items():
                try:
                    call = make(args, each)
                    if call is None:
                        continue
                    us = 1e3 * do_bench(call, warmup=5, rep=25, return_mode="median")
                except Exception:
                    results.sampled(provider, case, skipped=traceback.format_exc(limit=-2))
                    continue
                results.sampled(provider, case, time_us_p50=us)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    results = Samples(options.out)
    check_strange(results)
    check_distribution(results)
    check_tokens(results)
    if results.wrong == 0 and not options.no_time:
        time_all(results)
    print(f"{results.wrong} wrong")
    raise SystemExit(1 if results.wrong else 0)


if __name__ == "__main__":
    main()
