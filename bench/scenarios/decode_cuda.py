"""attention_decode's kernel in CUDA C++ on this GPU: right first, then timed beside the other providers.

    python bench/scenarios/decode_cuda.py --out rows.jsonl [--seconds 100] [--sets 4/16/3/2/64/2/1,..]

As decode_attention.py, with its rows, for one kernel, in less time: of triton-split it takes the sets of the shipped
table (--split). Checks are in processes of their own, which also compile: what breaks the GPU's context, or never ends,
is said and not timed. Where the kernel cannot be compiled or run, as with --device cpu, it says why, and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import decode_attention as attention
import torch
from decode_attention import LLAMA, ODD, SPEC, Caches, Layout, label, numbers
from graph_clock import Run, poisoned, problem

from fastkernels.overrides.l1 import _attention_decode_cuda as cuda
from fastkernels.overrides.l1 import _attention_decode_split as split
from fastkernels.spec import Case

CHECKS, CHECK_S = 4, 90  # processes, and seconds of each
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 700, 1025]
# Groups of 1 to 16 heads, head sizes, blocks of every kind; many sequences; one cut by all workers.
KINDS: tuple[tuple[str, list[int], Layout], ...] = (
    ("float16", LENGTHS, Layout(6, 6, 64, 1)), ("bfloat16", LENGTHS, Layout(9, 3, 64)),
    ("bfloat16", LENGTHS, Layout(16, 2, 128, 5)), ("float16", LENGTHS, Layout(16, 1, 128, 64)),
    ("bfloat16", LENGTHS, Layout(12, 1, 64, 256)), ("float16", LENGTHS, Layout(12, 4, 128, 1)),
    ("bfloat16", [3] * 700, LLAMA), ("bfloat16", [40000], LLAMA), ("bfloat16", [60000, 5] * 2, Layout(8, 1, 128, 16)),
    ("float16", [2048] * 3, Layout(5, 1, 128, 32)), ("bfloat16", [1] * 257, Layout(2, 2, 64, 1)),
)  # fmt: skip


def checks() -> list[tuple[str, dict[str, Any]]]:
    """(dtype, dims) of every batch that is checked."""
    found = [("bfloat16", {"seq_lens": n, "max_seqlen_k": most or max(n), **LLAMA.dims}) for n, most in ODD]
    found += [
        ("bfloat16", {"seq_lens": [n] * b, **LLAMA.dims}) for b, n in ((1, 8192), (8, 2048), (256, 512))
    ]
    return found + [(dtype, {"seq_lens": lens, **layout.dims}) for dtype, lens, layout in KINDS]


def check_share(run: Run, part: int, parts: int) -> None:
    """Every parts-th batch. The first share also has graphs and rows in wider tensors, the last one triton-split."""
    for dtype, dims in checks()[part::parts]:
        attention.check(run, [], dims, dtype)
    if part == 0:
        strided(run)
        for p in cuda.PARAMS:
            attention.graphs(run, "cuda-split", p)
    if part == parts - 1:
        for batch in (1, 8, 64):  # as they are timed: compiled in time
            attention.check(
                run, list(split.PARAMS), {"seq_lens": [2048] * batch, "max_seqlen_k": 8192, **LLAMA.dims}
            )


def strided(run: Run) -> None:
    """q in a packed qkv, keys and values of a block beside each other, as in a host."""
    args = SPEC.inputs(Case("strided", {"seq_lens": LENGTHS, **LLAMA.dims}), run.device, run.generator)
    packed = torch.cat([args[0], torch.full_like(args[0], float("nan"))], dim=1)
    both = torch.stack(args[1:3], dim=1)
    call = [packed[:, : LLAMA.heads], both[:, 0], both[:, 1], *args[3:]]
    for p in cuda.PARAMS:
        with poisoned():
            wrong = problem(partial(cuda.decode_cuda, *call, **p), attention.oracle(args))
        if wrong:
            run.row("check", "cuda-split", {"lengths": "strided", "params": label(p)}, wrong)
    run.row("check", "cuda-split", {"lengths": "strided"}, cases=len(cuda.PARAMS))


def check_all(run: Run, options: argparse.Namespace) -> None:
    """In processes of their own; their sets that are wrong go to run.bad. Raises SystemExit where one was lost."""
    sets = ["--sets", options.sets] if options.sets else []
    command = [
        sys.executable,
        __file__,
        "--out",
        str(options.out),
        "--device",
        options.device,
        *sets,
        "--check",
    ]
    begun = len(options.out.read_text().splitlines()) if options.out.exists() else 0
    children = [subprocess.Popen([*command, f"{i}/{CHECKS}"]) for i in range(CHECKS)]
    xqa = subprocess.Popen(
        [sys.executable, attention.__file__, "--out", os.devnull, "--compile", "flashinfer"]
    )
    end, lost = time.monotonic() + CHECK_S, []
    for i, child in enumerate(children):
        try:
            if child.wait(max(end - time.monotonic(), 0.1)) not in (0, 1):
                lost.append(f"check {i} of {CHECKS} ended with {child.returncode}")
        except subprocess.TimeoutExpired:
            child.kill()
            lost.append(f"check {i} of {CHECKS} did not end in {CHECK_S} s")
    attention.finish([xqa], max(end - time.monotonic(), 0.1))
    for line in options.out.read_text().splitlines()[begun:] if options.out.exists() else ():
        row = json.loads(line)
        if row["status"] == "wrong":
            run.wrong += 1
            run.bad.add((row["subject"]["provider"], row["case"].get("params", "")))
    if lost:
        raise SystemExit("; ".join(lost))


def time_all(run: Run, options: argparse.Namespace) -> None:
    contexts, batches = numbers(options.context), numbers(options.batch)
    cases = [(b, c) for c in contexts for b in batches if b * c <= attention.MOST_TOKENS]
    ragged = [b for b in numbers(options.ragged) if b * 2048 <= attention.MOST_TOKENS]
    tokens = max([b * c for b, c in cases] + [2048 * b for b in ragged])
    caches = Caches(run, LLAMA, tokens, attention.LAYERS, options.capacity)
    for batch, context in cases:
        if run.left() > 0:
            attention.time_case(run, "llama-8b", caches, batch, context)
    for batch in ragged:
        if run.left() > 0:
            attention.time_case(run, "ragged", caches, batch, 1024, ragged=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--batch", default="1,8,32,64,256")
    parser.add_argument("--context", default="512,2048,8192")
    parser.add_argument("--ragged", default="8,32,48,64", help="sequences of mixed lengths around 1024")
    parser.add_argument("--capacity", type=int, default=8192, help="keys that the graphs are captured for")
    parser.add_argument(
        "--sets", help="instead of the kernel's: warps/keys/stages/per_sm/least/ahead/cluster,.."
    )
    parser.add_argument(
        "--split",
        default="1/64/4/7/64/0,4/32/2/4/64/0,2/64/4/4/128/0,4/32/2/4/64/1",
        help="sets of triton-split",
    )
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
        if options.check:
            check_share(run, *map(int, options.check.split("/")))
            raise SystemExit(1 if run.wrong else 0)
        missing = cuda.no_hopper(cuda.SOURCE, torch.device(options.device, 0))
        run.row("child", "cuda-split", {}, missing or "", "unsupported" if missing else "")
        if missing is None:
            check_all(run, options)
            print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
            run.end = time.monotonic() + options.seconds
            time_all(run, options)
    print("\n".join(["", *run.summary, f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
