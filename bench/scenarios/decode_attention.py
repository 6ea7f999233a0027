"""attention_decode's kernel in one launch on this GPU beside what else there is: right first, then timed.

    python bench/scenarios/decode_attention.py --out rows.jsonl [--seconds 110] [--batch 1,8,32,64,256]

Needs torch and triton; FA3 and FlashInfer are timed beside it where they can be imported. Compiles all sets of
parameters in parallel, compares each with float64, replays graphs whose lengths change. Then times everything: a
model's layers with their own caches one after the other in a CUDA graph, so that nothing is in L2, the slope between n
and 2n replays, interleaved; and rope_store_kvcache beside the launches that it stands for.
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

import rope_store
import torch
from graph_clock import Compiles, Run, finish, measure, poisoned

from fastkernels import registry
from fastkernels.overrides.l1 import _attention_decode_split as split
from fastkernels.overrides.l1 import _flashinfer
from fastkernels.spec import Case

SPEC = registry.get("attention_decode")
PROVIDERS = {p.name: p for p in SPEC.op.providers}
COMPILE_S = 100
MOST_TOKENS = 1 << 19  # of a case: 64 GiB in 32 layers
Named = dict[
    str, tuple[str, dict[str, int], Callable[..., Any]]
]  # what is timed: provider, parameters, function
LAYERS, COLD = 32, 256 << 20  # bytes that one pass over the calls of a graph reads at least
CAPACITY = 8192  # what a server's graphs are captured for, in the cases of mixed lengths


class Layout(NamedTuple):
    """heads, key heads, head size, block size."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    @property
    def dims(self) -> dict[str, int]:
        return dict(zip(("heads", "kv_heads", "head_size", "block_size"), self, strict=True))


LLAMA = Layout()
# Qwen3-8B and Mixtral have Llama's; Qwen3-30B-A3B; Llama on two GPUs; SmolLM2-135M.
OTHERS = {"qwen3-30b": Layout(32, 4), "llama-tp2": Layout(16, 4), "smollm2": Layout(9, 3, 64)}
ODD: tuple[tuple[list[int], int], ...] = (
    ([0], 0), ([1], 0), ([15], 0), ([16], 4096), ([17], 0), ([0, 1, 15, 16, 17, 63, 64, 65], 8192),
    ([700, 0, 3, 1025, 2048], 0), ([5000], 8192), ([129] * 40, 4096),
)  # fmt: skip
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float16", {"seq_lens": [300, 7, 0], **Layout(6, 2, 96, 5).dims}),
    ("bfloat16", {"seq_lens": [1000, 3], **Layout(9, 3, 64).dims}),
    ("bfloat16", {"seq_lens": [1000, 3, 90], **Layout(8, 8, 128).dims}),
    ("bfloat16", {"seq_lens": [1000, 3, 150], "window_left": 127, **LLAMA.dims}),
    ("float16", {"seq_lens": [700, 30], "softcap": 20.0, **Layout(16, 2, 256, 32).dims}),
    ("float8_e4m3fn", {"seq_lens": [700, 30], "scales": (0.5, 0.75), "queries": "bfloat16", **LLAMA.dims}),
)  # fmt: skip


def label(params: dict[str, int]) -> str:
    return "/".join(map(str, params.values()))


def sets_of(run: Run, layout: Layout = LLAMA, size: int = 2) -> list[dict[str, int]]:
    """The sets that have room and are not known to be wrong."""
    sets = split.PARAMS[:: 4 if run.quick else 1]
    return [
        p
        for p in sets
        if split.has_room(p, layout.head_size, size) and ("triton-split", label(p)) not in run.bad
    ]


# -- compiling


def jobs() -> Iterator[tuple[Case, dict[str, int]]]:
    """A call for each kernel that will be launched."""
    for p in split.PARAMS:
        for lens in ([1], [1] * (64 if p["even"] else 4096)):  # with and without parts; of many sequences
            dims = {"seq_lens": lens, "max_seqlen_k": 4096, "max_blocks": 8, **LLAMA.dims}
            yield Case("compile", dims), p
    for dtype, dims in KINDS:
        for p in split.PARAMS[:3]:
            yield Case("compile", dims, dtype), p
    for layout in OTHERS.values():
        for p in split.PARAMS[::3]:
            yield Case("compile", {"seq_lens": [1], "max_seqlen_k": 4096, **layout.dims}), p


def compile_share(part: int, parts: int) -> None:
    split._decode_split_kernel = Compiles(split._decode_split_kernel)
    for case, p in list(jobs())[part::parts]:
        with contextlib.suppress(Exception):  # said where it is run
            args = SPEC.inputs(case, "cuda", torch.Generator("cuda"))
            split.decode_split(*args, **p)


def compile_flashinfer() -> None:
    """Its kernels are compiled by nvcc at their first call."""
    for layout in (LLAMA, *OTHERS.values()):
        with contextlib.suppress(Exception):
            case = Case("compile", {"seq_lens": [40], **layout.dims})
            PROVIDERS["flashinfer"].fn(*SPEC.inputs(case, "cuda", torch.Generator("cuda")))


def compile_all(sets: str | None) -> None:
    parts = max(1, (os.cpu_count() or 2) - 2)
    shares = [f"{i}/{parts}" for i in range(parts)]
    shares += ["flashinfer"] if PROVIDERS["flashinfer"].unavailable("cuda") is None else []
    given = ["--block-size", str(LLAMA.block_size), *(["--sets", sets] if sets else [])]
    command = [sys.executable, __file__, "--out", os.devnull, *given, "--compile"]
    workers = [subprocess.Popen([*command, share]) for share in shares]
    finish(workers, COMPILE_S)


# -- what is right


def problem(call: Callable[[], torch.Tensor], want: torch.Tensor) -> str:
    """'' if the call gives `want` (float64) as closely as its dtype allows, twice the same bits; else what is wrong."""
    try:
        first, second = call(), call()
        if not torch.equal(first, second):
            return "two equal calls have other bits"
        error = first.double() - want
        if not bool(error.isfinite().all()):
            return f"{int((~error.isfinite()).sum())} values are not finite"
        rms, limit = want.square().mean().sqrt().item(), 1.6e-2 if first.dtype == torch.bfloat16 else 2e-3
        if (
            not bool((error.abs() <= limit + limit * want.abs()).all())
            or error.square().mean().sqrt() > 8e-3 * rms
        ):
            return f"largest error {error.abs().max().item():.3g}, where values are {rms:.3g}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def oracle(args: list[Any]) -> torch.Tensor:
    return SPEC.reference(
        *[a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    )


def check(run: Run, sets: list[dict[str, int]], dims: dict[str, Any], dtype: str = "bfloat16") -> None:
    """The sets on one batch. Blocks that are no sequence's are full of NaN."""
    args = SPEC.inputs(Case("check", dims, dtype), run.device, run.generator)
    if dtype != "float8_e4m3fn":
        unused = torch.ones(args[1].shape[0], dtype=torch.bool, device=run.device)
        unused[args[4].flatten().long()] = False
        for cache in args[1:3]:
            cache[unused] = float("nan")
    want, about = (
        oracle(args),
        {"lengths": str(dims["seq_lens"])[:40], "heads": dims["heads"], "dtype": dtype},
    )
    for p in sets:
        with poisoned():
            wrong = problem(partial(split.decode_split, *args, **p), want)
        if wrong:
            run.bad.add(("triton-split", label(p)))
            run.row("check", "triton-split", {**about, "params": label(p)}, wrong)
        if "CUDA error" in wrong:
            raise SystemExit("the GPU's context is lost: nothing more can be measured")
    run.row("check", "triton-split", about, cases=len(sets))


def check_all(run: Run) -> None:
    if run.quick:
        dims = {"seq_lens": [0, 1, 15, 16, 17, 65], "max_seqlen_k": 256, **Layout(4, 1, 32).dims}
        return check(run, sets_of(run), dims, "float16")
    for lens, longest in ODD:
        check(run, sets_of(run), {"seq_lens": lens, "max_seqlen_k": longest or max(lens), **LLAMA.dims})
    for kind, dims in KINDS:
        size = 1 if kind == "float8_e4m3fn" else 2
        check(run, sets_of(run, Layout(head_size=dims["head_size"]), size)[:3], dims, kind)
    for batch, length in ((1, 8192), (8, 2048), (32, 2048), (256, 512)):
        check(run, sets_of(run), {"seq_lens": [length] * batch, **LLAMA.dims})
    for p in sets_of(run):
        graphs(run, p)
    zeros(run)


def graphs(run: Run, p: dict[str, int]) -> None:
    """Two graphs with the same kernel at once, whose lengths change between replays."""
    batches = [[900, 17, 4000], [1, 0, 65]]
    case = Case("graph", {"seq_lens": [4096] * 3, **LLAMA.dims})
    made = [SPEC.inputs(case, run.device, run.generator) for _ in "ab"]
    wrong = ""
    try:
        captured, outs, streams = [], [], [torch.cuda.Stream() for _ in made]
        for args in made:
            split.decode_split(*args, **p)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs.append(split.decode_split(*args, **p))
            captured.append(graph)
        for lens in (*batches, batches[0]):
            for args, out in zip(made, outs, strict=True):
                args[3].copy_(torch.tensor(lens))
                out.fill_(float("nan"))
            torch.cuda.synchronize()
            for graph, stream in zip(captured, streams, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(20):
                        graph.replay()
            torch.cuda.synchronize()
            for args, out in zip(made, outs, strict=True):
                if not torch.equal(out, split.decode_split(*args, **p)):
                    wrong = (
                        f"graphs replayed side by side have other bits than eager calls, for lengths {lens}"
                    )
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    if wrong:
        run.bad.add(("triton-split", label(p)))
    run.row("graphs", "triton-split", {"params": label(p)}, wrong, quiet=True)


def zeros(run: Run) -> None:
    """Zeros where a sequence has no keys, which FA3 writes itself: it gets memory that was not zeroed."""
    for name in ("fa3", "flashinfer"):
        provider = PROVIDERS[name]
        for lens in ([0], [0, 8000], [0, 5, 0, 700] * 8, [0] * 200):
            args = SPEC.inputs(Case("zeros", {"seq_lens": lens, **LLAMA.dims}), run.device, run.generator)
            if provider.unavailable("cuda") is None and provider.supports(*args) is None:
                with poisoned():
                    wrong = problem(partial(provider.fn, *args), oracle(args))
                run.row("zeros", name, {"lengths": str(lens)[:40]}, wrong)


def xqa(q: torch.Tensor, *args: Any) -> torch.Tensor:
    """FlashInfer as a host calls it: all of these sequences have keys."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _flashinfer.xqa(out, q, *args[:7])
    return out


# -- times


class Caches:
    """Keys and values of all layers, as many tokens as the largest case has."""

    def __init__(self, run: Run, layout: Layout, tokens: int, layers: int, capacity: int = 0) -> None:
        self.run, self.layout, self.blocks = run, layout, -(-tokens // layout.block_size)
        self.capacity = capacity  # 0: as long as the context
        shape = (layers, self.blocks, layout.block_size, layout.kv_heads, layout.head_size)
        dtype = torch.float16 if run.quick else torch.bfloat16
        self.keys, self.values = (run.randn(*shape, dtype=dtype) for _ in "kv")

    def calls(self, batch: int, context: int, ragged: bool = False) -> list[list[Any]]:
        """The arguments of enough calls that what they read is not in L2.

        ragged: lengths from an eighth of the context to almost twice it, in a call for any up to CAPACITY.
        """
        layout, run = self.layout, self.run
        longest = context * 15 // 8 if ragged else context
        width = -(-longest // layout.block_size)
        sets = min(
            max(-(-COLD // (len(self.keys) * kv_bytes(layout, batch, context))), 1),
            self.blocks // (batch * width),
        )
        order = torch.randperm(self.blocks, generator=run.generator, device=run.device).to(torch.int32)
        lens = (
            torch.linspace(2 * context - longest, longest, batch).int()[torch.randperm(batch)].to(run.device)
        )
        found = []
        for i in range(1 if run.quick else sets):
            table = order[i * batch * width : (i + 1) * batch * width].view(batch, width)
            for keys, values in zip(self.keys, self.values, strict=True):
                q = run.randn(batch, layout.heads, layout.head_size, dtype=keys.dtype)
                longest_ever = self.capacity or (CAPACITY if ragged else context)
                scalars = [longest_ever, layout.head_size**-0.5, -1, 0.0]
                found.append([q, keys, values, lens, table, *scalars])
        return found


def kv_bytes(layout: Layout, batch: int, context: int) -> int:
    return 2 * 2 * batch * context * layout.kv_heads * layout.head_size


def time_case(run: Run, model: str, caches: Caches, batch: int, context: int, ragged: bool = False) -> None:
    split.tickets.captured.clear()  # those of the case before are used up, and its graphs are gone
    split.tickets.streams.clear()
    calls = caches.calls(batch, context, ragged)
    named: Named = {}
    for name in ("triton", "fa3", "flashinfer"):
        provider = PROVIDERS[name]
        if run.cuda and provider.unavailable("cuda") is None and provider.supports(*calls[0]) is None:
            named[name] = (name, {}, xqa if name == "flashinfer" else provider.fn)
    for p in sets_of(run, caches.layout)[:: 1 if caches.layout == LLAMA else 3]:
        named[f"split {label(p)}"] = ("triton-split", p, partial(split.decode_split, **p))
    times = timed(run, named, calls)
    ours = sorted((n for n in times if named[n][0] == "triton-split"), key=times.__getitem__)
    size = kv_bytes(caches.layout, batch, context) + 4 * batch * caches.layout.heads * caches.layout.head_size
    for n, us in times.items():
        provider, p, _ = named[n]
        case = {"model": model, "batch": batch, "context": context, "params": label(p)}
        case |= {"capacity": caches.capacity} if caches.capacity else {}
        case |= {"block_size": caches.layout.block_size} if caches.layout.block_size != 16 else {}
        run.row("time", provider, case, us=us, tb_per_s=size / us / 1e6, quiet=True)
    kinds = {k: [n for n in times if named[n][0] == k] for k in ("triton", "fa3", "flashinfer")}
    kinds["split"] = ours
    firsts = {kind: min(names, key=times.__getitem__) for kind, names in kinds.items() if names}
    others = [times[n] for kind, n in firsts.items() if kind in ("fa3", "flashinfer")]
    for kind, n in firsts.items():
        ratio = f"{min(others) / times[n]:5.2f} x the better of the hosts'" if others else ""
        speed = f"{times[n]:8.2f} us {size / times[n] / 1e6:6.3f} TB/s"
        which = n if "split" in kind else ""
        where = f"{model} batch {batch:>3} context {context:>5}"
        run.summary.append(f"{where}  {kind:<10} {speed}  {ratio}  {which}")
        print(run.summary[-1], flush=True)


def timed(run: Run, named: Named, calls: list[list[Any]]) -> dict[str, float]:
    passes = measure(run, {n: [partial(fn, *args) for args in calls] for n, (_, _, fn) in named.items()})
    return {n: us / len(calls) for n, us in passes.items()}


def time_all(run: Run, batches: list[int], contexts: list[int], capacity: int) -> None:
    if run.quick:
        return time_case(run, "tiny", Caches(run, Layout(4, 2, 16), 256, 2, capacity), 2, 33)
    cases = [(b, c) for b in batches for c in contexts if b * c <= MOST_TOKENS]
    caches = Caches(run, LLAMA, max(b * c for b, c in cases), LAYERS, capacity)
    for batch, context in cases:
        if run.left() > 0:
            time_case(run, "llama-8b", caches, batch, context)
    for batch in (8, 32, 48, 64, 256):
        if run.left() > 0 and batch * 2048 <= caches.blocks * LLAMA.block_size:
            time_case(run, "ragged", caches, batch, 1024, ragged=True)
    del caches
    for model, layout in OTHERS.items():
        caches = Caches(run, layout, 32 * 2048, LAYERS, capacity)
        for batch, context in ((1, 2048), (4, 128), (32, 2048)):
            if run.left() > 0:
                time_case(run, model, caches, batch, context)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    global LLAMA, OTHERS
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--batch", default="1,32,8,64,256")
    parser.add_argument("--context", default="2048,512,8192")
    parser.add_argument("--block-size", type=int, default=16, help="keys of a block; SGLang has 1")
    parser.add_argument("--capacity", type=int, default=0, help="what the graphs are for; 0: the context")
    parser.add_argument(
        "--sets", help="instead of the kernel's: per_sm/block_n/warps/stages/min_split/even,."
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, fewer sets")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # what its own children are told
    options = parser.parse_args()
    if options.block_size != LLAMA.block_size:
        LLAMA, OTHERS = LLAMA._replace(block_size=options.block_size), {}
    if options.sets:
        split.PARAMS = tuple(split._set(*map(int, text.split("/"))) for text in options.sets.split(","))
    if options.compile == "flashinfer":
        return compile_flashinfer()
    if options.compile:
        return compile_share(*map(int, options.compile.split("/")))
    begin, run = time.monotonic(), Run("decode_attention", "attention_decode", options)
    run.common["baseline"] = "fa3"
    for name in ("fa3", "flashinfer"):
        print(f"{name}: {PROVIDERS[name].unavailable('cuda') or 'there'}", flush=True)
    with torch.inference_mode():
        if run.cuda and not run.quick:
            compile_all(options.sets)
            print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        check_all(run)
        print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
        time_all(run, numbers(options.batch), numbers(options.context), options.capacity)
        rope_store.run_all(run)
    print("\n".join(["", *run.summary, f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
