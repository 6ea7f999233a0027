"""Check our attention_decode kernels on this GPU, then time them against FA3 and FlashInfer.

    python bench/experiments/attention/decode_attention.py --out rows.jsonl [--seconds 110] [--batch 1,8,32,64,256]
    python bench/experiments/attention/decode_attention.py --out rows.jsonl --seconds 170 --model llama-8b \
        --batch 1,8,32,64,128,256 --context 512,1024,2048,8192,32768 --capacity 2048,131072 [--part 0/4]

`--capacity` is the number of keys that a graph is captured for, independent of the sequences' lengths. `--part 0/4`
times every fourth case, so that four GPUs can share the work; each part runs all checks.

Requires torch and triton; FA3 and FlashInfer are timed when they can be imported. The script compiles all parameter
sets in parallel (`cuda-split` needs NVRTC and a Hopper GPU). It compares each set with float64 and replays graphs whose
lengths change, in child processes, because a faulty kernel can corrupt the CUDA context or hang; if a check process is
lost, nothing is timed. Each timing captures several calls with their own keys in one CUDA graph, so that L2 holds none
of them, and takes the slope between n and 2n interleaved replays. `--device cpu --quick` runs the same code on tiny
shapes in Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.attention.decode_attention_check import (
    LAYOUTS,
    LLAMA,
    PROVIDERS,
    SETS,
    SPEC,
    Layout,
    batches,
    check_all,
    check_share,
    few_of,
    label,
    parsed_sets,
    sets_of,
)
from experiments.common.graph_clock import Compiles, Run, finish, rounds

from fastkernels.core.spec import Case
from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention import attention_decode_split as split
from fastkernels.overrides.attention import flashinfer
from fastkernels.overrides.kit.launch import tickets

COMPILE_S = 100
# label: (provider, parameters, function) of each timed variant
Named = dict[str, tuple[str, dict[str, int], Callable[..., Any]]]
CALLS = 32  # calls in a graph; fewer above PASS bytes read, more below COLD
COLD, PASS = 256 << 20, 2 << 30
MANY = 1000  # upper bound on the calls in a graph
POOL = 64 << 30  # bytes of key and value cache
MIXED = {"ragged": (8, 32, 48, 64, 128, 256), "exponential": (8, 32, 64, 128, 256)}  # sequences
MEAN = 1024  # mean keys per sequence of MIXED
CAPACITY = 8192  # default graph capacity of MIXED cases, in keys


class Timed(NamedTuple):
    """A timed case. `model` names a layout, or a distribution of lengths around `context`; capacity 0: the context."""

    model: str
    layout: Layout
    batch: int
    context: int
    capacity: int = 0

    @property
    def lens(self) -> list[int]:
        n, mean = self.batch, self.context
        if self.model == "ragged":  # from an eighth of the mean to almost twice it
            return torch.linspace(mean // 8, mean * 15 // 8, n).int().tolist()
        if self.model == "exponential":  # most are short, a few are long
            return [min(int(-mean * math.log(1 - (i + 0.5) / n)) + 1, self.most) for i in range(n)]
        return [mean] * n

    @property
    def most(self) -> int:
        """Keys that the graph is captured for."""
        return self.capacity or (CAPACITY if self.model in MIXED else self.context)

    @property
    def blocks(self) -> int:
        """Cache blocks that one call reads."""
        return self.batch * -(-max(self.lens) // self.layout.block_size)

    @property
    def bytes(self) -> int:
        return (
            sum(self.lens) * self.layout.token_bytes
            + 4 * self.batch * self.layout.heads * self.layout.head_size
        )

    @property
    def calls(self) -> int:
        """Number of calls in a graph, limited by the cache's size."""
        room = POOL // (self.blocks * self.layout.block_size * self.layout.token_bytes)
        return min(max(-(-COLD // self.bytes), min(CALLS, -(-PASS // self.bytes))), room, MANY)


def cases(
    models: list[str], block_size: int, batches: list[int], contexts: list[int], capacities: list[int]
) -> list[Timed]:
    """Return the cases of these models that fit; without a model, Llama's and a few of the other layouts."""
    found = []
    for capacity in capacities:
        for model in models or [LLAMA]:
            layout = LAYOUTS[model]._replace(block_size=block_size)
            for context in contexts:
                found += [
                    Timed(model, layout, b, context, capacity)
                    for b in batches
                    if context <= (capacity or context)
                ]
            for kind, several in MIXED.items():
                # MIXED names the distribution of lengths, whatever the layout.
                found += [
                    Timed(kind, layout, b, MEAN, capacity) for b in several if b in batches or not models
                ]
        if not models and block_size == Layout().block_size:
            for model in [m for m in LAYOUTS if m != LLAMA]:
                found += [
                    Timed(model, LAYOUTS[model], b, c, capacity) for b, c in ((1, 2048), (4, 128), (32, 2048))
                ]
    return [case for case in found if case.calls]


# -- compiling


def compile_share(run: Run, todo: list[Timed], part: int, parts: int) -> None:
    """Compile every parts-th of our kernels that is checked or timed, into the caches on disk."""
    for name in ("_decode_split_kernel", "_decode_even_kernel"):
        setattr(split, name, Compiles(getattr(split, name)))
    layouts = list(dict.fromkeys(at.layout for at in todo))
    timed = [
        Case("time", {"seq_lens": at.lens, "max_seqlen_k": at.most, **at.layout.dims}, "bfloat16")
        for at in todo
    ]
    # One kernel serves many batches: group by parameter set and layout.
    shares: dict[tuple[Any, ...], list[Callable[[], Any]]] = {}
    for case in [*batches(run, layouts), *timed]:
        small = {**case.dims, "seq_lens": [1] * len(case.dims["seq_lens"]), "max_blocks": 1, "blocks": 1}
        args = SPEC.inputs(replace(case, dims=small), run.device, run.generator)
        for name, p in sets_of(run, args, few_of(case, layouts)):
            call = partial(compile_cuda if name == "cuda-split" else split.decode_split, *args, **p)
            kind = tuple(v for n, v in case.dims.items() if n not in ("seq_lens", "max_seqlen_k"))
            shares.setdefault((name, label(p), case.dtype, kind), []).append(call)
    for calls in list(shares.values())[part::parts]:
        for call in calls:
            with contextlib.suppress(Exception):  # reported where it runs
                call()


def compile_cuda(q: torch.Tensor, key_cache: torch.Tensor, *rest: Any, **params: int) -> None:
    window_left, softcap = rest[5:7]
    cuda._kernel(q.device, cuda.plan(params, q, key_cache, window_left >= 0, softcap > 0))


def compile_flashinfer(layout: Layout) -> None:
    """Compile FlashInfer's kernels by one call."""
    with contextlib.suppress(Exception):
        case = Case("compile", {"seq_lens": [40], **layout.dims})
        PROVIDERS["flashinfer"].fn(*SPEC.inputs(case, "cuda", torch.Generator("cuda")))


def compile_all(command: list[str], of: int, layouts: int) -> None:
    """Compile in child processes, on this process's share of the cores: `of` GPUs' processes share the machine."""
    parts = max(1, (os.cpu_count() or 2) // of - 2)
    shares = [f"{i}/{parts}" for i in range(parts)]
    if PROVIDERS["flashinfer"].unavailable("cuda") is None:
        shares += [f"flashinfer/{i}" for i in range(layouts)]
    children = [subprocess.Popen([*command, "--out", os.devnull, "--compile", share]) for share in shares]
    for lost in finish(children, COMPILE_S):
        print(f"compiling: {lost}, of {len(children)}; the rest is compiled at first use", flush=True)


# -- times


def xqa(q: torch.Tensor, *args: Any) -> torch.Tensor:
    """Call FlashInfer as a host does, when every sequence has keys."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    flashinfer.xqa(out, q, *args[:7])
    return out


class Caches:
    """Key and value cache for all calls of a layout's largest case."""

    def __init__(self, run: Run, layout: Layout, blocks: int) -> None:
        self.run, self.layout, self.blocks = run, layout, blocks
        shape = (blocks, layout.block_size, layout.kv_heads, layout.head_size)
        dtype = torch.float16 if run.quick else torch.bfloat16
        self.keys, self.values = (run.randn(*shape, dtype=dtype) for _ in "kv")

    def calls(self, case: Timed) -> list[list[Any]]:
        """Arguments of each call; calls read disjoint blocks, in random order."""
        run, layout, needed = self.run, self.layout, case.blocks
        lens = torch.tensor(case.lens)[torch.randperm(case.batch)].int().to(run.device)
        found = []
        for i in range(1 if run.quick else case.calls):
            order = torch.randperm(needed, generator=run.generator, device=run.device) + i * needed
            q = run.randn(case.batch, layout.heads, layout.head_size, dtype=self.keys.dtype)
            table = order.int().view(case.batch, -1)
            found.append([q, self.keys, self.values, lens, table, case.most, layout.head_size**-0.5, -1, 0.0])
        return found


def time_case(run: Run, caches: Caches, at: Timed) -> None:
    for handed_out in (tickets.captured, tickets.streams):
        handed_out.clear()  # the previous case's graphs are gone, and its tickets used up
    calls = caches.calls(at)
    named: Named = {}
    for name in ("triton", "fa3", "flashinfer"):
        provider = PROVIDERS[name]
        if run.cuda and provider.unavailable("cuda") is None and provider.supports(*calls[0]) is None:
            named[name] = (name, {}, xqa if name == "flashinfer" and min(at.lens) else provider.fn)
    for name, p in sets_of(run, calls[0]):
        named[f"{name} {label(p)}"] = (name, p, partial(PROVIDERS[name].fn, **p))
    todo = {n: [partial(fn, *args) for args in calls] for n, (_, _, fn) in named.items()}
    times = {n: [us / len(calls) for us in passes] for n, passes in rounds(run, todo).items()}
    us = {n: statistics.median(each) for n, each in times.items()}
    for n, each in times.items():
        provider, p, _ = named[n]
        case = {"model": at.model, "batch": at.batch, "context": at.context, "params": label(p)}
        case |= {"capacity": at.capacity} if at.capacity else {}
        case |= {**at.layout.dims} if at.layout != Layout() or at.capacity else {}
        metrics = {"us": us[n], "tb_per_s": at.bytes / us[n] / 1e6}
        metrics |= {"us_sd": statistics.stdev(each)} if len(each) > 1 else {}
        run.row("time", provider, case, quiet=True, **metrics)
    report(run, at, named, us)


def report(run: Run, at: Timed, named: Named, us: dict[str, float]) -> None:
    names = ("triton", "fa3", "flashinfer", "triton-split", "cuda-split")
    kinds = {k: [n for n in us if named[n][0] == k] for k in names}
    firsts = {kind: min(names, key=us.__getitem__) for kind, names in kinds.items() if names}
    others = [us[n] for kind, n in firsts.items() if kind in ("fa3", "flashinfer")]
    for kind, n in firsts.items():
        ratio = f"{min(others) / us[n]:5.2f} x the faster of FA3 and FlashInfer" if others else ""
        speed = f"{us[n]:8.2f} us {at.bytes / us[n] / 1e6:6.3f} TB/s"
        where = f"{at.model} batch {at.batch:>3} context {at.context:>5} for {at.most:>6}"
        run.summary.append(f"{where}  {kind:<12} {speed}  {ratio}  {n if 'split' in kind else ''}")
        print(run.summary[-1], flush=True)


def time_all(run: Run, todo: list[Timed]) -> None:
    for layout in dict.fromkeys(case.layout for case in todo):
        mine = [case for case in todo if case.layout == layout]
        caches = Caches(run, layout, max(case.blocks * (1 if run.quick else case.calls) for case in mine))
        for case in mine:
            if run.left() > 0:
                time_case(run, caches, case)
            else:
                run.row(
                    "time", "none", case._asdict() | {"layout": str(layout)}, "time limit reached", "skipped"
                )
        del caches


# -- all


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--batch", default="1,32,8,64,256")
    parser.add_argument("--context", default="2048,512,8192")
    parser.add_argument("--block-size", type=int, default=16, help="keys per block; SGLang uses 1")
    parser.add_argument(
        "--capacity", default="0", help="keys that graphs are captured for, comma-separated; 0: the context"
    )
    parser.add_argument(
        "--model", default="", help=f"comma-separated, of {', '.join(LAYOUTS)}: time only these"
    )
    parser.add_argument("--part", default="0/1", help="i/n: case i, i + n, i + 2n, ...")
    parser.add_argument(
        "--sets",
        help="only these: triton-split:per_sm/block_n/warps/stages/min_split/even,cuda-split:warps/..",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, fewer sets")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # what its own children are told
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.model.split(",") if options.model else []
    if unknown := [m for m in models if m not in LAYOUTS]:
        parser.error(f"--model {unknown[0]!r}: known: {', '.join(LAYOUTS)}")
    part, of = (int(n) for n in options.part.split("/"))
    if not 0 <= part < of:
        parser.error(f"--part {options.part}: the first of 4 is 0/4, the last is 3/4")
    if options.sets:
        try:
            SETS.update(parsed_sets(options.sets))
        except ValueError as error:
            parser.error(f"--sets {error}")
    lists = numbers(options.batch), numbers(options.context), numbers(options.capacity)
    todo = cases(models, options.block_size, *lists)[part::of]
    if options.quick:
        todo = [Timed(kind, Layout(4, 2, 16), 2, 33, c) for kind in (LLAMA, "ragged") for c in lists[2]][
            part::of
        ]
    layouts = list(dict.fromkeys(case.layout for case in todo))
    if options.compile and options.compile.startswith("flashinfer/"):
        return compile_flashinfer(layouts[int(options.compile.partition("/")[2])])
    begin, run = time.monotonic(), Run("decode_attention", "attention_decode", options)
    run.common["baseline"] = "fa3"
    with torch.inference_mode():
        if options.compile:
            return compile_share(run, todo, *map(int, options.compile.split("/")))
        if options.check:
            return check_share(run, layouts, *map(int, options.check.split("/")))
        command = [sys.executable, __file__, *sys.argv[1:]]
        missing = {name: PROVIDERS[name].unavailable("cuda") for name in ("fa3", "flashinfer")}
        missing["cuda-split"] = cuda.no_hopper(cuda.SOURCE, torch.device(options.device, 0))
        for name, reason in missing.items():
            print(f"{name}: {reason or 'found'}", flush=True)
        if run.cuda and not run.quick:
            compile_all(command, of, len(layouts))
            print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        check_all(run, command)
        print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
        time_all(run, todo)
    print("\n".join(["", *run.summary, f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
