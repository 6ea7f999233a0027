"""Time plans of the CUDA kernels for GPT-OSS's MXFP4 experts, and tiles of our Triton kernel, against vLLM's kernel.

    mxfp4_experts.py --out rows.jsonl [--tokens 32,64,1] [--plans "ahead=2;rows=4 parts=2"]
    mxfp4_experts.py --out rows.jsonl --tokens 8192,1024 --plans "stages=6;skew=0" --tiles "64/128/128/8/4/3"

A plan names the fields of both products' plans that differ from the default ones: those of mxfp4_gemm.py up to 8 rows
an expert, behind that those of mxfp4_prompt.py. Tiles have the form of fastkernels/overrides/moe/moe_tiles.py. Times
are microseconds of an MLP: a CUDA graph has calls with several routings, and kernels take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.graph_clock import Run, against, poisoned, rounds

from fastkernels.core.spec import Case
from fastkernels.overrides.moe import fused_experts_swigluoai as op
from fastkernels.overrides.moe import moe_tiles
from fastkernels.overrides.moe.production import _MXFP4, _fused_experts_mxfp4

TURNS = 4  # routings of a graph
LIMIT = 1e-2  # relative error: results of both products are rounded to bfloat16
SIZES = {"topk": 4, "hidden": 2880, "intermediate": 2880, "mxfp4": True}
DEFAULT = op._plans


def planned(params: dict[str, Any], *args: Any) -> torch.Tensor:
    op._plans = lambda *of: tuple(p._replace(**params) for p in DEFAULT(*of))
    try:
        return op._cuda(*args)
    finally:
        op._plans = DEFAULT


def measure(run: Run, tokens: int, experts: int, plans: list[str], tiles: list[str]) -> None:
    sizes = {**SIZES, "hidden": 64, "intermediate": 96} if run.quick else SIZES
    told = {"tokens": tokens, "experts": experts}
    case = Case("experts", {**sizes, **told}, "bfloat16")
    args = list(op.SPEC.inputs(case, run.device, run.generator))[:9]
    several = []
    for _ in range(TURNS):
        weights, ids = run.randn(tokens, experts, dtype=torch.float32).softmax(-1).topk(4)
        several.append([*args[:5], weights, ids.int(), *args[7:]])
    calls: dict[str, Callable[..., torch.Tensor]] = {"torch": op._torch}
    if run.cuda:
        calls = {"triton": op._triton, **{text: partial(op._triton, tiles=text) for text in tiles}}
        calls["cuda"] = op._cuda
        for text in plans:
            calls[text] = partial(planned, {k: int(v) for k, v in (f.split("=") for f in text.split())})
        if find_spec("vllm") is not None:
            calls["vllm"] = partial(_fused_experts_mxfp4(), prepared=[p.make(*args) for p in _MXFP4])
    want = op.reference(several[0][0].float(), *several[0][1:])
    for name, call in list(calls.items()):
        with poisoned():
            error = ((call(*several[0]).float() - want).norm() / want.norm()).item()
        if not error < LIMIT:
            run.row("check", name, told, f"its relative error is {error:.3g}, over {LIMIT}")
            del calls[name]
    times = rounds(run, {name: [partial(call, *a) for a in several] for name, call in calls.items()})
    for name, us in times.items():
        gains: dict[str, Any] = {
            f"speedup_{o}": against(us, times[o]) for o in ("cuda", "vllm") if o in times and o != name
        }
        run.row(
            "time", name, told, us=statistics.median(us) / TURNS,
            **{m: gain[0] for m, gain in gains.items()}, ci95={m: gain[1] for m, gain in gains.items()},
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="file of rows (JSONL), which are appended")
    parser.add_argument("--seconds", type=float, default=300, help="time limit")
    parser.add_argument("--tokens", default="32,64,1,4,8,16,96")
    parser.add_argument("--experts", type=int, default=32, help="128: GPT-OSS-120B's")
    parser.add_argument("--plans", default="", help="separated by ;")
    parser.add_argument("--tiles", default="", help="of the Triton kernel, separated by ;")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    tiles = [text for text in options.tiles.split(";") if text]
    try:
        for text in tiles:
            moe_tiles.parsed(text)
    except ValueError as error:
        parser.error(str(error))
    run = Run("mxfp4_experts", "fused_experts_swigluoai", options)
    run.common["baseline"] = "vllm"
    for tokens in options.tokens.split(","):
        if run.left() < 0:
            print(f"the time is up before {tokens} tokens", file=sys.stderr)
            return 1
        measure(run, int(tokens), options.experts, [text for text in options.plans.split(";") if text], tiles)
    return bool(run.wrong)


if __name__ == "__main__":
    sys.exit(main())
