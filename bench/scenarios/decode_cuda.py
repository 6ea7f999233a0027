"""attention_decode's kernel in CUDA C++ on this GPU: right first, then timed beside the other providers.

    python bench/scenarios/decode_cuda.py --out rows.jsonl [--seconds 100] [--sets 4/16/3/2/64/2/1,..]

Its rows are those of decode_attention.py; of triton-split it times the sets of --split, the shipped table's. Checks are
in processes of their own, which also compile: what breaks the GPU's context, or never ends, is said, and nothing timed.
Times are of calls with their own keys, one after the other in a CUDA graph, so that nothing is in L2. Where the kernel
cannot be compiled or run, as with --device cpu, it says why, and no more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_clock import Run, finish, measure, poisoned

from fastkernels import registry
from fastkernels.overrides.l1 import _attention_decode_cuda as cuda
from fastkernels.overrides.l1 import _attention_decode_split as split
from fastkernels.overrides.l1 import _flashinfer
from fastkernels.overrides.l1._launch import tickets
from fastkernels.spec import Case

SPEC = registry.get("attention_decode")
PROVIDERS = {p.name: p for p in SPEC.op.providers}
CHECKS, CHECK_S = 4, 90  # processes, and seconds of all
CALLS, COLD, PASS, POOL = (
    32,
    256 << 20,
    2 << 30,
    8 << 30,
)  # of a graph; bytes it reads at least, at most; of all keys
OURS = {"cuda-split": cuda.decode_cuda, "triton-split": split.decode_split}


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
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 700, 1025]
# Of every kind: groups of 1 to 16 heads, head sizes, blocks; many sequences; one cut by all workers. (dtype, lengths,
# what the call may have, layout)
BATCHES: tuple[tuple[str, list[int], int, Layout], ...] = (
    *(("bfloat16", [n], 4096, LLAMA) for n in (0, 1, 15, 16, 17, 5000)), ("bfloat16", EDGES, 8192, LLAMA),
    ("bfloat16", [129] * 40, 4096, LLAMA), ("bfloat16", [8192], 8192, LLAMA), ("bfloat16", [2048] * 8, 8192, LLAMA),
    ("bfloat16", [512] * 256, 512, LLAMA), ("bfloat16", [*range(0, 1400, 7)], 4096, LLAMA),
    ("float16", EDGES, 2048, Layout(6, 6, 64, 1)), ("bfloat16", EDGES, 2048, Layout(9, 3, 64)),
    ("bfloat16", EDGES, 2048, Layout(16, 2, 128, 5)), ("float16", EDGES, 2048, Layout(16, 1, 128, 64)),
    ("bfloat16", EDGES, 2048, Layout(12, 1, 64, 256)), ("float16", EDGES, 2048, Layout(12, 4, 128, 1)),
    ("bfloat16", [3] * 700, 16, LLAMA), ("bfloat16", [40000], 40000, LLAMA),
    ("bfloat16", [60000, 5] * 2, 60000, Layout(8, 1, 128, 16)), ("float16", [2048] * 3, 2048, Layout(5, 1, 128, 32)),
    ("bfloat16", [1] * 257, 8, Layout(2, 2, 64, 1)),
)  # fmt: skip


def label(params: dict[str, int]) -> str:
    return "/".join(map(str, params.values()))


def sets_of(run: Run, args: list[Any]) -> Iterator[tuple[str, dict[str, int]]]:
    """(provider, set) of ours that take a call and are not known to be wrong."""
    for name, sets in (("cuda-split", cuda.PARAMS), ("triton-split", split.PARAMS)):
        provider = PROVIDERS[name]
        if provider.supports(*args) is None:
            yield from (
                (name, p) for p in sets if provider.fits(p, *args) and (name, label(p)) not in run.bad
            )


# -- what is right


def problem(call: Callable[[], torch.Tensor], want: torch.Tensor) -> str:
    """'' if the call gives `want` (float64) as closely as its dtype allows, twice the same bits; else what is wrong."""
    try:
        first, second = call(), call()
        if not torch.equal(first, second):
            return "two equal calls have other bits"
        error, limit = (first.double() - want).abs(), 1.6e-2 if first.dtype == torch.bfloat16 else 2e-3
        rms = want.square().mean().sqrt().item()
        if not bool((error <= limit + limit * want.abs()).all()) or error.square().mean().sqrt() > 8e-3 * rms:
            return f"largest error {error.max().item():.3g}, where values are {rms:.3g}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def oracle(args: list[Any]) -> torch.Tensor:
    wide = (a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    return SPEC.reference(*wide)


def check(run: Run, ours: str, args: list[Any], want: torch.Tensor, about: dict[str, Any]) -> None:
    done = 0
    for name, p in sets_of(run, args):
        if name != ours:
            continue
        with poisoned():
            wrong = problem(partial(OURS[name], *args, **p), want)
        done += 1
        if wrong:
            run.bad.add((name, label(p)))
            run.row("check", name, {**about, "params": label(p)}, wrong)
        if "CUDA error" in wrong or "CUDA_ERROR" in wrong:
            raise SystemExit("the GPU's context is lost: nothing more can be measured")
    run.row("check", ours, about, "" if done else "no set takes this call", cases=done)


def check_share(run: Run, part: int, parts: int) -> None:
    """Every parts-th batch. The first share also has graphs and rows in wider tensors, the last one triton-split."""
    for dtype, lens, longest, layout in BATCHES[part::parts]:
        case = Case("check", {"seq_lens": lens, "max_seqlen_k": longest, **layout.dims}, dtype)
        args = SPEC.inputs(case, run.device, run.generator)
        unused = torch.ones(args[1].shape[0], dtype=torch.bool, device=run.device)
        unused[args[4].flatten().long()] = False
        for cache in args[1:3]:
            cache[unused] = float("nan")
        about = {"lengths": str(lens)[:40], **layout.dims, "dtype": dtype}
        check(run, "cuda-split", args, oracle(args), about)
    if part == 0:
        strided(run)
        for p in cuda.PARAMS if run.cuda else ():
            graphs(run, p)
    for batch in (1, 8, 64) if part == parts - 1 else ():  # as they are timed: compiled in time
        case = Case("check", {"seq_lens": [2048] * batch, "max_seqlen_k": 8192, **LLAMA.dims})
        args = SPEC.inputs(case, run.device, run.generator)
        check(run, "triton-split", args, oracle(args), {"lengths": f"2048 x {batch}"})


def strided(run: Run) -> None:
    """q in a packed qkv, keys and values of a block beside each other, as in a host."""
    args = SPEC.inputs(Case("strided", {"seq_lens": EDGES, **LLAMA.dims}), run.device, run.generator)
    packed = torch.cat([args[0], torch.full_like(args[0], float("nan"))], dim=1)
    both = torch.stack(args[1:3], dim=1)
    call = [packed[:, : LLAMA.heads], both[:, 0], both[:, 1], *args[3:]]
    check(run, "cuda-split", call, oracle(args), {"lengths": "strided"})


def graphs(run: Run, p: dict[str, int]) -> None:
    """Graphs of four calls in a row, on two streams at once, whose lengths and tables change between replays."""
    case = Case("graph", {"seq_lens": [4096] * 3, **LLAMA.dims})
    made = [SPEC.inputs(case, run.device, run.generator) for _ in "ab"]
    streams, captured, outs, wrong = [torch.cuda.Stream() for _ in made], [], [], ""
    try:
        for args in made:
            cuda.decode_cuda(*args, **p)
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                outs.append([cuda.decode_cuda(*args, **p) for _ in range(4)])
            captured.append(graph)
        for lens in ([900, 17, 4000], [1, 0, 65], [4096, 4096, 1], [900, 17, 4000]):
            for args, several in zip(made, outs, strict=True):
                args[3].copy_(torch.tensor(lens))
                args[4].copy_(args[4].flip(0))
                for out in several:
                    out.fill_(float("nan"))
            torch.cuda.synchronize()
            for graph, stream in zip(captured, streams, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(20):
                        graph.replay()
            torch.cuda.synchronize()
            for args, several in zip(made, outs, strict=True):
                want = cuda.decode_cuda(*args, **p)
                if not all(torch.equal(out, want) for out in several):
                    wrong = f"graphs side by side have other bits than eager calls, for lengths {lens}"
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    run.row("graphs", "cuda-split", {"params": label(p)}, wrong, quiet=True)


def check_all(run: Run, given: list[str]) -> None:
    """In processes of their own; the sets that are wrong go to run.bad. Raises SystemExit where one was lost."""
    begun = len(run.out.read_text().splitlines()) if run.out.exists() else 0
    command = [sys.executable, __file__, *given, "--check"]
    children = [subprocess.Popen([*command, f"{i}/{CHECKS}"]) for i in range(CHECKS)]
    xqa_child = subprocess.Popen([*command, "flashinfer"])  # which nvcc compiles
    end, lost = time.monotonic() + CHECK_S, []
    for i, child in enumerate(children):
        try:
            if child.wait(max(end - time.monotonic(), 0.1)) not in (0, 1):
                lost.append(f"check {i} of {CHECKS} ended with {child.returncode}")
        except subprocess.TimeoutExpired:
            child.kill()
            lost.append(f"check {i} of {CHECKS} did not end in {CHECK_S} s")
    finish([xqa_child], max(end - time.monotonic(), 0.1))
    for row in map(json.loads, run.out.read_text().splitlines()[begun:] if run.out.exists() else ()):
        if row["status"] == "wrong":
            run.wrong += 1
            run.bad.add((row["subject"]["provider"], row["case"].get("params", "")))
    if lost:
        raise SystemExit("; ".join(lost))


# -- times


def xqa(q: torch.Tensor, *args: Any) -> torch.Tensor:
    """FlashInfer as a host calls it: all of these sequences have keys."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _flashinfer.xqa(out, q, *args[:7])
    return out


def time_case(
    run: Run, caches: list[torch.Tensor], model: str, lens: list[int], context: int, most: int
) -> None:
    for handed_out in (tickets.captured, tickets.streams):
        handed_out.clear()  # those of the case before are used up, and its graphs are gone
    batch, width = len(lens), -(-max(lens) // LLAMA.block_size)
    size = 4 * LLAMA.head_size * (LLAMA.kv_heads * sum(lens) + LLAMA.heads * batch)
    count = min(max(-(-COLD // size), min(CALLS, -(-PASS // size))), caches[0].shape[0] // (batch * width))
    lengths = torch.tensor(lens)[torch.randperm(batch)].int().to(run.device)
    order = torch.randperm(count * batch * width, generator=run.generator, device=run.device).int()
    tail = [max(most, max(lens)), LLAMA.head_size**-0.5, -1, 0.0]
    calls = [
        [run.randn(batch, LLAMA.heads, LLAMA.head_size), *caches, lengths, table.view(batch, width), *tail]
        for table in order.chunk(count)
    ]
    named: dict[str, tuple[str, dict[str, int], Callable[..., Any]]] = {}
    for name in ("fa3", "flashinfer"):
        provider = PROVIDERS[name]
        if provider.unavailable("cuda") is None and provider.supports(*calls[0]) is None:
            named[name] = name, {}, xqa if name == "flashinfer" else provider.fn
    for name, p in sets_of(run, calls[0]):
        named[f"{name} {label(p)}"] = name, p, partial(OURS[name], **p)
    passes = measure(run, {n: [partial(fn, *args) for args in calls] for n, (*_, fn) in named.items()})
    us = {n: all_calls / count for n, all_calls in passes.items()}
    firsts: dict[str, str] = {}
    for n in sorted(us, key=us.__getitem__):
        provider_name, p, _ = named[n]
        case = {"model": model, "batch": batch, "context": context, "params": label(p), "capacity": most}
        run.row("time", provider_name, case, us=us[n], tb_per_s=size / us[n] / 1e6, quiet=True)
        firsts.setdefault(provider_name, n)
    for n in firsts.values():
        where = f"{model} batch {batch:>3} context {context:>5}"
        run.summary.append(f"{where} {us[n]:8.2f} us {size / us[n] / 1e6:6.3f} TB/s  {n}")
        print(run.summary[-1], flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def time_all(run: Run, options: argparse.Namespace) -> None:
    room = POOL // (4 * LLAMA.head_size * LLAMA.kv_heads * LLAMA.block_size)  # blocks
    caches = [run.randn(room, LLAMA.block_size, LLAMA.kv_heads, LLAMA.head_size) for _ in "kv"]
    cases = [("llama-8b", [c] * b, c) for c in numbers(options.context) for b in numbers(options.batch)]
    for b in numbers(options.ragged):  # from an eighth of the mean to almost twice it
        cases.append(("ragged", torch.linspace(128, 1920, b).int().tolist(), 1024))
    for model, lens, context in cases:
        if run.left() > 0 and len(lens) * -(-max(lens) // LLAMA.block_size) <= room:
            time_case(run, caches, model, lens, context, options.capacity)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="of timing")
    parser.add_argument("--batch", default="1,8,32,64,256")
    parser.add_argument("--context", default="512,2048,8192")
    parser.add_argument("--ragged", default="8,32,48,64", help="sequences of mixed lengths around 1024")
    parser.add_argument("--capacity", type=int, default=8192, help="keys that the graphs are captured for")
    parser.add_argument(
        "--sets", help="instead of the kernel's: warps/keys/stages/per_sm/least/ahead/cluster,.."
    )
    parser.add_argument(
        "--split", help="sets of triton-split",
        default="1/64/4/7/64/0,4/32/2/4/64/0,2/64/4/4/128/0,4/32/2/4/64/1",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--check", help=argparse.SUPPRESS)  # what its own children are told
    options = parser.parse_args()
    options.quick = options.device == "cpu"
    if options.sets:
        cuda.PARAMS = tuple(cuda._set(*map(int, text.split("/"))) for text in options.sets.split(","))
    split.PARAMS = tuple(split._set(*map(int, text.split("/"))) for text in options.split.split(","))
    begin, run = time.monotonic(), Run("decode_attention", "attention_decode", options)
    run.common["baseline"] = "fa3"
    with torch.inference_mode():
        if options.check == "flashinfer":
            with contextlib.suppress(Exception):  # said where it is timed
                case = Case("compile", {"seq_lens": [40], **LLAMA.dims})
                PROVIDERS["flashinfer"].fn(*SPEC.inputs(case, "cuda", torch.Generator("cuda")))
            return
        if options.check:
            check_share(run, *map(int, options.check.split("/")))
            raise SystemExit(1 if run.wrong else 0)
        missing = cuda.no_hopper(cuda.SOURCE, torch.device(options.device, 0))
        run.row("child", "cuda-split", {}, missing or "", "unsupported" if missing else "")
        if missing is None:
            check_all(run, sys.argv[1:])
            print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
            run.end = time.monotonic() + options.seconds
            time_all(run, options)
    print("\n".join(["", *run.summary, f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
