"""Check our mla_decode providers on this GPU, then time them against FlashMLA, FA3 and FlashInfer.

    python bench/experiments/attention/mla_decode.py --out rows.jsonl [--seconds 85] [--sets keys=32/turns=1,..]

Each timing captures several calls in one CUDA graph, each with its own cache and queries as the layers of a model have
them, and takes the slope between n and 2n interleaved replays. Preparations of vLLM's steps are made once:
FlashMLA's schedule (`flashmla-schedule` makes it in each call), FlashInfer's plan, and FA3's metadata (`vllm` is its
default on Hopper, FLASH_ATTN_MLA, with up to 32 splits; our provider `fa3` makes the metadata in each call).

Lengths `ragged` are exponentially distributed around 1024. FlashInfer compiles for a minute; cases that were timed
before are timed again with it at the end. `--device cpu --quick` runs the same code on tiny shapes in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.graph_clock import Run, poisoned, rounds
from experiments.common.kernel_check import other_bits, problem

from fastkernels.core import registry
from fastkernels.core.cuda_rtc import cubin
from fastkernels.overrides.latent_attention import mla_decode_cuda as cuda

OP = registry.get("mla_decode")
PROVIDERS = {p.name: p for p in OP.op.providers}
OURS = [name for name in PROVIDERS if name not in ("torch", "reference")]  # main() keeps those of --providers
RANK, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5  # of heads before absorption
COLD, CALLS = 160 << 20, 160  # bytes of a graph's caches: above L2; most calls in a graph
MEAN = 1024  # keys of a ragged batch's sequences
RMS = 6e-3
HANGS = 15  # seconds after which a check ends the process
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700, 1025]
# Lengths, heads, block size, dtype, keys that the graph is captured for (0: the longest length)
CHECKS: tuple[tuple[list[int], int, int, str, int], ...] = (
    ([0], 16, 64, "bfloat16", 4096), ([1], 128, 64, "bfloat16", 0), (EDGES, 16, 64, "bfloat16", 4096),
    (EDGES, 128, 64, "bfloat16", 0), (EDGES, 64, 16, "float16", 0), (EDGES, 20, 32, "bfloat16", 0),
    (EDGES, 100, 128, "bfloat16", 0), ([5000], 16, 64, "bfloat16", 0), ([16384] * 2, 128, 64, "bfloat16", 0),
    ([600] * 32, 16, 64, "bfloat16", 0), ([3, 9000, *range(60, 2000, 63)], 64, 64, "bfloat16", 16384),
    ([*range(0, 1400, 7)], 16, 16, "bfloat16", 0), ([1100] * 132, 128, 64, "bfloat16", 0),
    ([1] * 300, 1, 64, "float16", 8), ([5000], 1, 64, "bfloat16", 0), ([40000, 5], 130, 64, "bfloat16", 0),
)  # fmt: skip


class Timed(NamedTuple):
    """A timed case: equal lengths, or with context 0 exponentially distributed ones."""

    heads: int
    batch: int
    context: int
    capacity: int = 0  # keys that the graph is captured for

    @property
    def lens(self) -> list[int]:
        if self.context:
            return [self.context] * self.batch
        n = self.batch
        return [min(int(-MEAN * math.log(1 - (i + 0.5) / n)) + 1, 8192) for i in range(n)]

    @property
    def bytes(self) -> int:
        return 2 * sum(self.lens) * (RANK + ROPE) + 2 * self.batch * self.heads * (2 * RANK + ROPE)

    @property
    def flops(self) -> int:
        return 2 * sum(self.lens) * self.heads * (2 * RANK + ROPE)

    @property
    def calls(self) -> int:
        return min(max(-(-COLD // self.bytes), 4), CALLS)


def inputs(
    run: Run, lens: list[int], heads: int, size: int, dtype: torch.dtype, most: int, calls: int = 1, unused: float = 0.0
) -> list[Any]:  # fmt: skip
    """Arguments of each call: other queries and caches, the same lengths and table. unused: value of free slots."""
    blocks = [-(-n // size) for n in lens]
    width, used = max(-(-most // size), 1), sum(blocks)
    shape = (used + 1, size, RANK + ROPE)
    order = torch.randperm(used, generator=run.generator, device=run.device).int()
    table = torch.full((len(lens), width), used, dtype=torch.int32, device=run.device)
    ends, at = torch.full((used + 1,), size, device=run.device), 0
    for i, n in enumerate(blocks):
        table[i, :n] = order[at : at + n]
        if n:
            ends[order[at + n - 1]] = lens[i] - (n - 1) * size
        at += n
    ends[used] = 0
    free = torch.arange(size, device=run.device)[None] >= ends[:, None]
    found = []
    for _ in range(calls):
        cache = run.randn(*shape, dtype=dtype)
        cache[free] = unused
        q = run.randn(len(lens), heads, RANK + ROPE, dtype=dtype)
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=run.device)
        found.append([q, cache, seq_lens, table, most, SCALE, RANK])
    return found


# -- checks


def compile_sets(sets: list[dict[str, Any]]) -> None:
    """Compile the CUDA kernels that are checked or timed, in parallel, into the cache on disk."""
    kinds = dict.fromkeys(
        cuda.plan(
            torch.empty(1, heads, dtype=getattr(torch, kind)),
            torch.empty(1, size),
            **p,
        )
        for _, heads, size, kind, _ in CHECKS
        for p in sets or [{}]
    )
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda p: cubin(cuda.source(p), ("--gpu-architecture=sm_90a", *p.options)), kinds))


def ours(run: Run, args: list[Any], sets: list[dict[str, Any]]) -> dict[str, Callable[..., Any]]:
    """Functions of our providers that support a call, one for each set of parameters of the CUDA kernel."""
    found: dict[str, Callable[..., Any]] = {}
    for name in OURS:
        provider = PROVIDERS[name]
        if provider.unavailable(run.device) or (provider.supports and provider.supports(*args) is not None):
            continue
        for p in sets if name == "cuda" and sets else [{}]:
            found[" ".join([name, *(f"{k}={v}" for k, v in p.items())])] = partial(provider.fn, **p)
    return found


def check_all(run: Run, sets: list[dict[str, Any]], bad: set[str]) -> None:
    for lens, heads, size, kind, longest in CHECKS:
        if run.quick and (max(lens) > 200 or (kind == "bfloat16" and not run.cuda)):
            continue
        (args,) = inputs(run, lens, heads, size, getattr(torch, kind), longest or max(lens), 1, math.nan)
        wide = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
        want = OP.reference(*wide)
        about = {"lengths": str(lens)[:30], "heads": heads, "block_size": size, "dtype": kind}
        for name, fn in ours(run, args, sets).items():
            if run.cuda:
                faulthandler.dump_traceback_later(HANGS, exit=True)
            with poisoned():
                wrong = problem(partial(fn, *args), want, rms=RMS)
            if not wrong and run.cuda and len(lens) in (13, 32):
                one = fn(*args)
                wrong = other_bits([partial(fn, *args)] * 2, [one, one])
            faulthandler.cancel_dump_traceback_later()
            if wrong:
                bad.add(name)
            run.row("check", name, about, wrong)
        del args, wide, want


# -- baselines


def flashmla(args: list[Any], schedule: bool) -> Callable[..., Any]:
    """FlashMLA; schedule: make its schedule in each call."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    made = get_mla_metadata()[0]

    def call(q: Any, cache: Any, lens: Any, table: Any, longest: int, scale: float, rank: int) -> Any:
        meta = get_mla_metadata()[0] if schedule else made
        return flash_mla_with_kvcache(
            q=q.unsqueeze(1), k_cache=cache.unsqueeze(-2), block_table=table, cache_seqlens=lens, head_dim_v=rank,
            tile_scheduler_metadata=meta, softmax_scale=scale, causal=True,
        )[0].squeeze(1)  # fmt: skip

    call(*args)
    return call


def fa3(args: list[Any]) -> Callable[..., Any]:
    """FA3 as vLLM's FLASH_ATTN_MLA calls it in CUDA graphs."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    q, cache, lens, _, longest, _, rank = args
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    made = get_scheduler_metadata(
        batch_size=len(q), max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=q.shape[1], num_heads_kv=1,
        headdim=q.shape[2] - rank, cache_seqlens=lens, qkv_dtype=q.dtype, headdim_v=rank, page_size=cache.shape[1],
        cu_seqlens_q=starts, causal=True, num_splits=32,
    )  # fmt: skip

    def call(q: Any, cache: Any, lens: Any, table: Any, longest: int, scale: float, rank: int) -> Any:
        return flash_attn_varlen_func(
            q=q[..., rank:], k=cache[..., rank:].unsqueeze(-2), v=cache[..., :rank].unsqueeze(-2), q_v=q[..., :rank],
            max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=longest, seqused_k=lens, block_table=table,
            softmax_scale=scale, causal=True, fa_version=3, scheduler_metadata=made, num_splits=32,
        )  # fmt: skip

    return call


def flashinfer(args: list[Any]) -> Callable[..., Any]:
    """FlashInfer, planned for these lengths."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    q, cache, lens, table, _, scale, rank = args
    size = cache.shape[1]
    pages = (lens + size - 1) // size
    indices = table[torch.arange(table.shape[1], device=q.device) < pages[:, None]]
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=q.device))
    wrapper.plan(
        torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
        torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0)), indices, lens, q.shape[1], rank,
        q.shape[2] - rank, size, True, scale, q.dtype, cache.dtype,
    )  # fmt: skip

    def call(q: Any, cache: Any, lens: Any, table: Any, longest: int, scale: float, rank: int) -> Any:
        return wrapper.run(q[..., :rank], q[..., rank:], cache[..., :rank], cache[..., rank:])

    return call


BASELINES: dict[str, Callable[[list[Any]], Callable[..., Any]]] = {
    "flashmla": partial(flashmla, schedule=False), "flashmla-schedule": partial(flashmla, schedule=True), "vllm": fa3,
    "flashinfer": flashinfer,
}  # fmt: skip


# -- times


def time_case(
    run: Run, at: Timed, sets: list[dict[str, Any]], baselines: list[str], bad: set[str], eager: bool = False
) -> None:
    dtype = torch.bfloat16 if run.cuda else torch.float16
    calls = inputs(
        run, at.lens, at.heads, 64, dtype, at.capacity or max(at.lens), 1 if run.quick else at.calls
    )
    named = {n: fn for n, fn in ours(run, calls[0], sets).items() if n not in bad}
    for name in baselines if run.cuda else []:
        try:
            named[name] = BASELINES[name](calls[0])
        except Exception as error:
            run.row("time", name, at._asdict(), f"{type(error).__name__}: {str(error)[:200]}", "unsupported")
    base = named.get("flashmla")
    if base is not None:  # a baseline that is called wrongly must not be compared
        want = base(*calls[0]).double()
        for name in [n for n in named if n in BASELINES]:
            if wrong := problem(partial(named[name], *calls[0]), want):
                run.row("time", name, at._asdict(), wrong, "skipped")
                del named[name]
    if eager:  # for a profiler
        for fn in named.values():
            for _ in range(4):
                fn(*calls[0])
        torch.cuda.synchronize()
        return
    todo = {n: [partial(fn, *args) for args in calls] for n, fn in named.items()}
    times = {n: [us / len(calls) for us in passes] for n, passes in rounds(run, todo).items()}
    us = {n: statistics.median(each) for n, each in times.items()}
    best = min((us[n] for n in us if n in BASELINES and n != "flashmla-schedule"), default=math.nan)
    for n, each in times.items():
        metrics = {"us": us[n], "gb_per_s": at.bytes / us[n] / 1e3, "tflops": at.flops / us[n] / 1e6}
        metrics |= {"us_sd": statistics.stdev(each)} if len(each) > 1 else {}
        run.row("time", n, at._asdict(), quiet=True, **metrics)
    parts = [f"{n} {us[n]:.2f}" + ("" if n in BASELINES else f" ({best / us[n]:.2f}x)") for n in us]
    where = f"heads {at.heads:>3} batch {at.batch:>3} context {at.context or 'ragged':>6}"
    run.summary.append(f"{where}: {at.bytes / 3.35e6:.1f} us at 3.35 TB/s; {', '.join(parts)}")
    print(run.summary[-1], flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--heads", default="16,128,64")
    parser.add_argument("--batch", default="32,1,128,8,64")
    parser.add_argument("--context", default="600,4096,0,16384,1100", help="0: ragged")
    parser.add_argument(
        "--capacity", type=int, default=0, help="keys that graphs are captured for; 0: the longest"
    )
    parser.add_argument("--sets", default="", help="of the CUDA kernel: key=value/key=value,...")
    parser.add_argument("--baselines", default=",".join(BASELINES))
    parser.add_argument("--providers", default=",".join(OURS))
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--eager", action="store_true", help="call everything four times, for a profiler")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--compile-flashinfer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    begin, run = time.monotonic(), Run("mla_decode", "mla_decode", options)
    run.common["baseline"] = "flashmla"
    OURS[:] = [name for name in options.providers.split(",") if name]
    if options.compile_flashinfer:
        (args,) = inputs(run, [100], 16, 64, torch.bfloat16, 128)
        flashinfer(args)(*args)
        torch.cuda.synchronize()
        return
    sets = [
        {key: int(value) for key, value in (pair.split("=") for pair in one.split("/"))}
        for one in options.sets.split(",") if one
    ]  # fmt: skip
    baselines, bad = [b for b in options.baselines.split(",") if b], set[str]()
    child = None
    if run.cuda and "flashinfer" in baselines:
        child = subprocess.Popen([sys.executable, __file__, "--out", "/dev/null", "--compile-flashinfer"])
    if run.cuda and "cuda" in OURS:
        compile_sets(sets)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    with torch.inference_mode():
        if not options.no_checks:
            check_all(run, sets, bad)
        print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
        todo = [
            Timed(h, b, c, options.capacity)
            for c in numbers(options.context) for b in numbers(options.batch) for h in numbers(options.heads)
            if c or b > 1
        ]  # fmt: skip
        if run.quick:
            todo = [Timed(3, 2, 70)]
        late: list[Timed] = []
        for case in todo:
            if run.left() <= 0:
                break
            ready = child is None or child.poll() is not None
            if not ready:
                late.append(case)
            now = baselines if ready else [b for b in baselines if b != "flashinfer"]
            time_case(run, case, sets, now, bad, options.eager)
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(run.left(), 0.1))
            child.kill()
            print(f"FlashInfer was compiled: {child.poll() == 0}", flush=True)
        for case in late:
            if run.left() > 0 and "flashinfer" in baselines:
                time_case(run, case, sets, ["flashmla", "vllm", "flashinfer"], bad)
    print(f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
