"""Time attention_decode at long contexts: each parameter set of cuda-split, the default choice, and FA3.

    python bench/experiments/attention/long_contexts.py --out rows.jsonl [--seconds 150] [--layout llama-8b,gpt-oss]
        [--dtype bfloat16,float8_e4m3fn] [--batch 1,8,32] [--context 1024,16384,65536,131072]

A row has microseconds and the share of the floor: the time in which an H200 reads the keys and values (`--tb-per-s`).
All graphs are captured for `--capacity` keys, as a host captures them, so the rows at 1,024 keys tell whether the
choice for long contexts also suits short ones. Layouts with a window read the window's keys only. FA3 (vLLM's) reads
an FP8 cache for queries in FP8, and "q8" means ours with such queries.

The kernels are compiled in threads and compared with float64 first; a wrong set is not timed. `--device cpu --quick`
runs the same code on tiny shapes without our CUDA kernels; its times mean nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.attention.decode_attention_check import PROVIDERS, RMS, SPEC, label, oracle
from experiments.common.graph_clock import Run, poisoned, rounds
from experiments.common.kernel_check import problem

from fastkernels.core.spec import Case
from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.kit.launch import tickets

BLOCK, ROUNDS, THREADS, LONG = 16, 7, 16, 131072
COLD, POOL = 256 << 20, 24 << 30  # bytes that the calls of a graph read at least; bytes of caches
FP8 = torch.float8_e4m3fn


class Layout(NamedTuple):
    """heads, key heads, head size; window 0: none."""

    heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    sinks: bool = False

    @property
    def dims(self) -> dict[str, Any]:
        found: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "head_size": self.head_size}
        found |= {"window_left": self.window - 1} if self.window else {}
        return found | ({"sinks": True} if self.sinks else {}) | {"block_size": BLOCK}


LAYOUTS = {
    "llama-8b": Layout(32, 8, 128), "qwen2.5-7b": Layout(28, 4, 128), "llama-70b": Layout(64, 8, 128),
    "llama-70b-tp8": Layout(8, 1, 128), "qwen3-235b-tp4": Layout(16, 1, 128), "qwen2.5-14b": Layout(40, 8, 128),
    "mha": Layout(32, 32, 128), "gemma-3": Layout(16, 8, 256), "qwen3-next": Layout(16, 2, 256),
    "llama-1b": Layout(32, 8, 64), "gpt-oss": Layout(64, 8, 64, 0, True), "window-128": Layout(64, 8, 64, 128, True),
    "window-1024": Layout(32, 8, 128, 1024), "window-4096": Layout(32, 8, 128, 4096),
}  # fmt: skip


USUAL = (
    "llama-8b", "llama-70b", "qwen3-235b-tp4", "qwen2.5-7b", "gemma-3", "llama-1b", "gpt-oss", "window-128",
    "window-4096",
)  # fmt: skip


class Timed(NamedTuple):
    """A timed case: `batch` sequences of `context` keys each."""

    model: str
    dtype: str  # of the cache
    batch: int
    context: int

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.model]

    @property
    def blocks(self) -> int:
        return self.batch * -(-self.context // BLOCK)

    @property
    def token_bytes(self) -> int:
        return 2 * self.layout.kv_heads * self.layout.head_size * (1 if self.dtype == "float8_e4m3fn" else 2)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that a call reads."""
        return self.batch * min(self.context, self.layout.window or self.context) * self.token_bytes

    @property
    def calls(self) -> int:
        """Calls in a graph, each on its own blocks; 0 if one does not fit the pool."""
        room = POOL // (self.blocks * BLOCK * self.token_bytes)
        return min(max(-(-COLD // self.bytes), 2), room, 64)


def cases(models: list[str], dtypes: list[str], batches: list[int], contexts: list[int]) -> list[Timed]:
    """Return all cases that fit, those of a layout and dtype together, for which one cache is allocated."""
    every = [Timed(m, d, b, c) for m in models for d in dtypes for b in batches for c in contexts]
    return [case for case in every if case.calls]


def arguments(run: Run, model: str, dtype: str, lens: list[int], query: str = "") -> list[Any]:
    """Return a small call for checks and compilation. query: the dtype of q and of an FP8 cache's queries."""
    dims = {**LAYOUTS[model].dims, "seq_lens": lens}
    if dtype == "float8_e4m3fn":
        dims |= {"queries": query or "bfloat16", "scales": (0.5, 0.75)}
    return SPEC.inputs(Case("long", dims, dtype), run.device, run.generator)[:12]


def sets_of(args: list[Any]) -> list[dict[str, int]]:
    """Return the usual set and those that suit long contexts, as far as a call can have them."""
    provider = PROVIDERS["cuda-split"]
    if provider.supports is not None and provider.supports(*args) is not None:
        return []
    planned = [(p, cuda.plan(p, *args[:2])) for p in cuda.PARAMS if "whole" not in p]
    fitting = [(p, plan) for p, plan in planned if cuda.has_room(plan) and p["per_sm"] <= plan.resident]
    return [p for p, plan in fitting if p is cuda.PARAMS[0] or cuda.suits_long(p, plan)]


def default_of(args: list[Any]) -> list[dict[str, int]]:
    return [cuda.choose(*args[:2], LONG)] if sets_of(args) else []


def plans(run: Run, todo: list[Timed]) -> Iterator[tuple[torch.device, cuda.Plan]]:
    """Yield the kernels that are checked or timed."""
    for model, dtype in dict.fromkeys((at.model, at.dtype) for at in todo):
        for query in ("", "float8_e4m3fn") if dtype == "float8_e4m3fn" else ("",):
            args = arguments(run, model, dtype, [1], query)
            sinks = args[11]
            for p in default_of(args) if query else [*default_of(args), *sets_of(args)]:
                yield args[0].device, cuda.plan(p, args[0], args[1], args[7] >= 0, args[8] > 0, sinks)


def check(run: Run, model: str, dtype: str, query: str) -> set[str]:
    """Compare every set with float64 on short and long sequences; return those that are wrong."""
    args, bad = arguments(run, model, dtype, [0, 1, 63, 700, 40000], query), set[str]()
    sets = default_of(args) if query else sets_of(args)
    if not sets:
        return bad
    wide = [a.float() if isinstance(a, torch.Tensor) and a.dtype == FP8 else a for a in args]
    want = oracle(wide)
    for p in sets:
        with poisoned():
            wrong = problem(partial(cuda.decode_cuda, *args, **p), want, rms=RMS)
        about = {"model": model, "dtype": dtype, "query": query, "params": label(p)}
        run.row("check", "cuda-split", about, wrong, quiet=True)
        if wrong:
            bad.add(label(p))
    return bad


class Caches:
    """Keys and values of all calls of a layout, in one dtype. FP8 ones are random bytes without NaN."""

    def __init__(self, run: Run, at: Timed, blocks: int) -> None:
        shape = (blocks, BLOCK, at.layout.kv_heads, at.layout.head_size)
        self.run = run
        self.both = [self._made(shape, at.dtype) for _ in "kv"]

    def _made(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        if dtype != "float8_e4m3fn":
            return self.run.randn(*shape, dtype=torch.bfloat16)
        made = torch.empty(shape, dtype=torch.uint8, device=self.run.device)
        return made.random_(0, 256, generator=self.run.generator).bitwise_and_(0xBF).view(FP8)

    def calls(self, at: Timed, capacity: int, query: torch.dtype) -> list[list[Any]]:
        """Arguments of each call; calls read disjoint blocks, in random order."""
        found, layout, device = [], at.layout, self.run.device
        lens = torch.full((at.batch,), at.context, dtype=torch.int32, device=device)
        sinks = self.run.randn(layout.heads) if layout.sinks else None
        for i in range(at.calls):
            order = (
                torch.randperm(at.blocks, generator=self.run.generator, device=device).int() + i * at.blocks
            )
            table = torch.zeros(at.batch, -(-capacity // BLOCK), dtype=torch.int32, device=device)
            table[:, : at.blocks // at.batch] = order.view(at.batch, -1)
            q = self.run.randn(at.batch, layout.heads, layout.head_size).to(query)
            scale, window = layout.head_size**-0.5, layout.window - 1
            found.append([q, *self.both, lens, table, capacity, scale, window, 0.0, 1.0, 1.0, sinks])
        return found


def variants(
    run: Run, caches: Caches, at: Timed, capacity: int, bad: set[str]
) -> dict[str, list[Callable[[], Any]]]:
    """Return {name: calls}: the op's default, each set, and FA3."""
    calls = caches.calls(at, capacity, torch.bfloat16)
    q8 = caches.calls(at, capacity, FP8) if at.dtype == "float8_e4m3fn" else []
    op = SPEC.op
    found = {"op": [partial(op, *args) for args in calls]}
    if q8:
        found["op q8"] = [partial(op, *args) for args in q8]
    for p in sets_of(calls[0]):
        if label(p) not in bad:
            found[f"cuda {label(p)}"] = [partial(cuda.decode_cuda, *args, **p) for args in calls]
    fa3 = PROVIDERS["fa3"]
    for name, theirs in (("fa3", calls), ("fa3 q8", q8)):
        if (
            theirs
            and run.cuda
            and fa3.unavailable("cuda") is None
            and (fa3.supports is None or fa3.supports(*theirs[0]) is None)
        ):
            found[name] = [partial(fa3.fn, *args) for args in theirs]
    return found


def time_case(run: Run, caches: Caches, at: Timed, capacity: int, speed: float, bad: set[str]) -> None:
    for handed_out in (tickets.captured, tickets.streams):
        handed_out.clear()  # the previous case's graphs are gone, and its tickets used up
    todo = variants(run, caches, at, capacity, bad)
    times = rounds(run, todo, ROUNDS)
    floor = 1e-6 * at.bytes / speed
    us = {name: statistics.median(each) / at.calls for name, each in times.items()}
    chosen = (
        label(cuda.choose(*caches.calls(at, capacity, torch.bfloat16)[0][:2], capacity)) if run.cuda else ""
    )
    for name, value in us.items():
        case = {**at._asdict(), "capacity": capacity, "variant": name, "chosen": chosen}
        run.row("time", name.split()[0], case, quiet=True, us=value, of_floor=floor / value)
    ours = {name: value for name, value in us.items() if name.startswith("cuda")}
    best = min(ours, key=ours.__getitem__, default="")
    shares = [
        f"{name} {floor / us[name]:.3f}" for name in ("op", "op q8", "fa3", "fa3 q8", best) if name in us
    ]
    where = f"{at.model:<16} {at.dtype:<14} {at.batch:>3} x {at.context:>6} floor {floor:8.1f} us"
    run.summary.append(f"{where}  {'  '.join(shares)}  chosen {chosen}")
    print(run.summary[-1], flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--layout", default=",".join(USUAL), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--dtype", default="float8_e4m3fn,bfloat16")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--context", default="1024,16384,65536,131072")
    parser.add_argument("--capacity", type=int, default=131072, help="keys that graphs are captured for")
    parser.add_argument("--tb-per-s", type=float, default=4.45)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="one tiny shape")
    options = parser.parse_args()
    models = options.layout.split(",")
    if unknown := [m for m in models if m not in LAYOUTS]:
        parser.error(f"--layout {unknown[0]!r}: known: {', '.join(LAYOUTS)}")
    dtypes, capacity = options.dtype.split(","), options.capacity
    if wrong := [d for d in dtypes if d not in ("bfloat16", "float8_e4m3fn")]:
        parser.error(f"--dtype {wrong[0]!r}: known: bfloat16, float8_e4m3fn")
    contexts = numbers(options.context)
    if max(contexts) > capacity:
        parser.error(f"--context {max(contexts)} is over --capacity {capacity}")
    todo = cases(models, dtypes, numbers(options.batch), contexts)
    if options.quick:
        todo, capacity = [Timed("llama-1b", dtype, 1, 40) for dtype in dtypes], 64
    begin, run = time.monotonic(), Run("long_contexts", "attention_decode", options)
    run.common["baseline"] = "fa3"
    with torch.inference_mode():
        if run.cuda:
            kernels = list(dict.fromkeys(plans(run, todo)))
            torch.cuda.synchronize()

            def compiled(kernel: tuple[torch.device, cuda.Plan]) -> None:
                torch.cuda.set_device(kernel[0])
                cuda._kernel(*kernel)

            with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
                list(pool.map(compiled, kernels))
            print(f"{len(kernels)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
        for model, dtype in dict.fromkeys((at.model, at.dtype) for at in todo):
            mine = [at for at in todo if (at.model, at.dtype) == (model, dtype)]
            bad = check(run, model, dtype, "")
            if dtype == "float8_e4m3fn":
                bad |= check(run, model, dtype, "float8_e4m3fn")
            caches = Caches(run, mine[0], max(at.blocks * at.calls for at in mine))
            for at in mine:
                if run.left() > 0:
                    time_case(run, caches, at, capacity, options.tb_per_s, bad)
                else:
                    run.row("time", "none", at._asdict(), "time limit reached", "skipped", quiet=True)
            del caches
    shares = [float(line.split(" op ")[1].split()[0]) for line in run.summary]
    mean = statistics.geometric_mean(shares) if shares and min(shares) > 0 else math.nan
    print(f"{run.wrong} wrong; the default's share of the floor, geometric mean of {len(shares)}: {mean:.3f}")
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
