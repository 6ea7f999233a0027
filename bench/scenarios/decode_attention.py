"""attention_decode's kernels of ours on this GPU beside what else there is: right first, then timed.

    python bench/scenarios/decode_attention.py --out rows.jsonl [--seconds 110] [--batch 1,8,32,64,256]
    python bench/scenarios/decode_attention.py --out rows.jsonl --seconds 170 --model llama-8b \
        --batch 1,8,32,64,128,256 --context 512,1024,2048,8192,32768 --capacity 2048,131072 [--part 0/4]
    python bench/scenarios/decode_attention.py --out rows.jsonl --few --seconds 95

The second is what decode_table.py makes a table of: a server's graph is for `--capacity` keys, whatever its sequences
have, and --part 0/4 times every fourth case from the first on, so that four GPUs share them (each checks, too). The
third is for calls of few keys, with sets of ours and checks of its own (decode_attention_few.py).

Needs torch and triton; FA3 and FlashInfer are timed beside ours where they can be imported. Compiles all sets of both
kernels in parallel (triton-split; cuda-split where NVRTC and a Hopper are), compares each with float64, replays graphs
whose lengths change, in processes of their own: if one breaks the GPU's context or never ends, that is said, and
nothing timed. Then times all that is right: several calls with their own keys one after the other in a CUDA graph, so
that nothing is in L2, the slope between n and 2n replays, interleaved; and without --model other models' shapes, and
rope_store_kvcache beside the launches that it stands for. --device cpu --quick runs all of it on tiny shapes,
interpreted (TRITON_INTERPRET=1): the times mean nothing there.
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

import decode_attention_few
import rope_store
import torch
from decode_attention_check import (
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
from graph_clock import Compiles, Run, finish, rounds

from fastkernels.core.spec import Case
from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention import attention_decode_split as split
from fastkernels.overrides.attention import flashinfer
from fastkernels.overrides.kit.launch import tickets

COMPILE_S = 100
# What is timed: provider, parameters, function
Named = dict[str, tuple[str, dict[str, int], Callable[..., Any]]]
CALLS = 32  # of a graph: fewer where they read more than PASS bytes, more where they read less than COLD
COLD, PASS = 256 << 20, 2 << 30
MANY = 1000  # calls of a graph: of few keys, which read less than COLD in so many, or as good as nothing
POOL = 64 << 30  # bytes of keys and values on the device
MIXED = {"ragged": (8, 32, 48, 64, 128, 256), "exponential": (8, 32, 64, 128, 256)}  # sequences
MEAN = 1024  # keys of their sequences
CAPACITY = 8192  # what a graph is for that has them, unless it is said


class Timed(NamedTuple):
    """A case: `model` is the layout's, how lengths differ around `context`, or the lengths; capacity 0: the context."""

    model: str
    layout: Layout
    batch: int
    context: int
    capacity: int = 0

    @property
    def lens(self) -> list[int]:
        n, mean = self.batch, self.context
        if self.is_said:
            return [int(length) for length in self.model.split("+")]
        if self.model == "ragged":  # from an eighth of the mean to almost twice it
            return torch.linspace(mean // 8, mean * 15 // 8, n).int().tolist()
        if self.model == "exponential":  # most are short, a few are long
            return [min(int(-mean * math.log(1 - (i + 0.5) / n)) + 1, self.most) for i in range(n)]
        return [mean] * n

    @property
    def is_said(self) -> bool:
        """Whether `model` is the lengths."""
        return self.model[0].isdigit()

    @property
    def most(self) -> int:
        """Keys that a call may have."""
        return self.capacity or (CAPACITY if self.model in MIXED else self.context)

    @property
    def blocks(self) -> int:
        """Of a call."""
        return self.batch * -(-max(self.lens) // self.layout.block_size)

    @property
    def bytes(self) -> int:
        return (
            sum(self.lens) * self.layout.token_bytes
            + 4 * self.batch * self.layout.heads * self.layout.head_size
        )

    @property
    def calls(self) -> int:
        """How many are enough, of those that there is room for."""
        room = POOL // (self.blocks * self.layout.block_size * self.layout.token_bytes)
        return min(max(-(-COLD // self.bytes), min(CALLS, -(-PASS // self.bytes))), room, MANY)


def cases(
    models: list[str], block_size: int, batches: list[int], contexts: list[int], capacities: list[int]
) -> list[Timed]:
    """Those of the models, one of which has room for at least a call; of other models a few, where none is named."""
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
                # What lengths are is said once, whatever the layout is.
                found += [
                    Timed(kind, layout, b, MEAN, capacity) for b in several if b in batches or not models
                ]
        if not models and block_size == Layout().block_size:
            for model in [m for m in LAYOUTS if m != LLAMA]:
                found += [
                    Timed(model, LAYOUTS[model], b, c, capacity) for b, c in ((1, 2048), (4, 128), (32, 2048))
                ]
    return [case for case in found if case.calls]


def few_keys() -> list[Timed]:
    return [
        Timed("+".join(map(str, lens)), layout, len(lens), max(lens), most)
        for lens, layout, most in decode_attention_few.CASES
    ]


# -- compiling


def compile_share(run: Run, todo: list[Timed], part: int, parts: int) -> None:
    """Every parts-th kernel of ours of all that is checked and timed, into Triton's cache and cuda_rtc's."""
    for name in ("_decode_split_kernel", "_decode_even_kernel"):
        setattr(split, name, Compiles(getattr(split, name)))
    layouts = list(dict.fromkeys(at.layout for at in todo))
    timed = [
        Case("time", {"seq_lens": at.lens, "max_seqlen_k": at.most, **at.layout.dims}, "bfloat16")
        for at in todo
    ]
    # A kernel is one for many batches: those of one set and layout are one process's.
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
            with contextlib.suppress(Exception):  # said where it is run
                call()


def compile_cuda(q: torch.Tensor, key_cache: torch.Tensor, *_: Any, **params: int) -> None:
    cuda._kernel(q.device, cuda.plan(params, q, key_cache))


def compile_flashinfer(layout: Layout) -> None:
    """Its kernels are compiled by nvcc at their first call."""
    with contextlib.suppress(Exception):
        case = Case("compile", {"seq_lens": [40], **layout.dims})
        PROVIDERS["flashinfer"].fn(*SPEC.inputs(case, "cuda", torch.Generator("cuda")))


def compile_all(command: list[str], of: int, layouts: int, few: bool) -> None:
    """In the processors that the `of` GPUs' processes have for each. few: FlashInfer is left out if it takes long."""
    parts = max(1, (os.cpu_count() or 2) // of - 2)
    shares = [f"{i}/{parts}" for i in range(parts)]
    if PROVIDERS["flashinfer"].unavailable("cuda") is None:
        shares += [f"flashinfer/{i}" for i in range(layouts)]
    children = [subprocess.Popen([*command, "--out", os.devnull, "--compile", share]) for share in shares]
    for lost in finish(children, decode_attention_few.COMPILE_S if few else COMPILE_S):
        print(
            f"compiling: {lost}, of {len(children)}; what it has left is compiled where it is run", flush=True
        )
    if few and any(child.poll() != 0 for child in children[parts:]):
        print("FlashInfer was not compiled in time, and is not timed", flush=True)
        PROVIDERS["flashinfer"] = replace(PROVIDERS["flashinfer"], devices=())


# -- times


def xqa(q: torch.Tensor, *args: Any) -> torch.Tensor:
    """FlashInfer as a host calls it: all of these sequences have keys."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    flashinfer.xqa(out, q, *args[:7])
    return out


class Caches:
    """Keys and values of all calls of a layout's largest case."""

    def __init__(self, run: Run, layout: Layout, blocks: int) -> None:
        self.run, self.layout, self.blocks = run, layout, blocks
        shape = (blocks, layout.block_size, layout.kv_heads, layout.head_size)
        dtype = torch.float16 if run.quick else torch.bfloat16
        self.keys, self.values = (run.randn(*shape, dtype=dtype) for _ in "kv")

    def calls(self, case: Timed) -> list[list[Any]]:
        """The arguments of the calls, each of which reads blocks of its own, in any order."""
        run, layout, needed = self.run, self.layout, case.blocks
        lens = torch.tensor(case.lens)[torch.randperm(case.batch)].int().to(run.device)
        found = []
        for i in range(1 if run.quick else case.calls):
            order = torch.randperm(needed, generator=run.generator, device=run.device) + i * needed
            q = run.randn(case.batch, layout.heads, layout.head_size, dtype=self.keys.dtype)
            table = order.int().view(case.batch, -1)
            mine = lens.clone() if case.is_said else lens  # as in the judge; a step's layers have the same
            found.append([q, self.keys, self.values, mine, table, case.most, layout.head_size**-0.5, -1, 0.0])
        return found


def time_case(run: Run, caches: Caches, at: Timed) -> None:
    for handed_out in (tickets.captured, tickets.streams):
        handed_out.clear()  # those of the case before are used up, and its graphs are gone
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
    said(run, at, named, us)


def said(run: Run, at: Timed, named: Named, us: dict[str, float]) -> None:
    names = ("triton", "fa3", "flashinfer", "triton-split", "cuda-split")
    kinds = {k: [n for n in us if named[n][0] == k] for k in names}
    firsts = {kind: min(names, key=us.__getitem__) for kind, names in kinds.items() if names}
    others = [us[n] for kind, n in firsts.items() if kind in ("fa3", "flashinfer")]
    for kind, n in firsts.items():
        ratio = f"{min(others) / us[n]:5.2f} x the better of the hosts'" if others else ""
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
                    "time", "none", case._asdict() | {"layout": str(layout)}, "no time was left", "skipped"
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
    parser.add_argument("--block-size", type=int, default=16, help="keys of a block; SGLang has 1")
    parser.add_argument(
        "--capacity", default="0", help="what the graphs are for, several by commas; 0: the context"
    )
    parser.add_argument(
        "--model", default="", help=f"of {', '.join(LAYOUTS)}: all cases of these, and nothing else"
    )
    parser.add_argument("--part", default="0/1", help="i/n: case i, i + n, i + 2n, ...")
    parser.add_argument(
        "--sets",
        help="instead of all: triton-split:per_sm/block_n/warps/stages/min_split/even,cuda-split:warps/..",
    )
    parser.add_argument("--few", action="store_true", help="calls of few keys, and sets for them")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, fewer sets")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # what its own children are told
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.model.split(",") if options.model else []
    if unknown := [m for m in models if m not in LAYOUTS]:
        parser.error(f"--model {unknown[0]!r}: there are {', '.join(LAYOUTS)}")
    part, of = (int(n) for n in options.part.split("/"))
    if not 0 <= part < of:
        parser.error(f"--part {options.part}: the first of 4 is 0/4, the last is 3/4")
    if options.few:
        decode_attention_few.use()
    if options.sets:
        try:
            SETS.update(parsed_sets(options.sets))
        except ValueError as error:
            parser.error(f"--sets {error}")
    lists = numbers(options.batch), numbers(options.context), numbers(options.capacity)
    todo = (few_keys() if options.few else cases(models, options.block_size, *lists))[part::of]
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
            print(f"{name}: {reason or 'there'}", flush=True)
        if run.cuda and not run.quick:
            compile_all(command, of, len(layouts), options.few)
            print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        check_all(run, command)
        print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
        time_all(run, todo)
        if not models and not options.few:
            rope_store.run_all(run)
    print("\n".join(["", *run.summary, f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
