"""Time experts with MXFP4 and NVFP4 weights: our CUDA kernel with several plans, and vLLM's kernel.

    fp4_experts.py --out rows.jsonl [--cases qwen3-30b,gpt-oss-20b] [--tokens 1,8,16,32,64,128] [--skew 1]
        [--sweep 8,32,64,128]

A case names a format and sizes, see CASES. Times are microseconds of an MLP: a CUDA graph has calls of two layers with
several routings, and kernels take turns. `default` is what the op runs, a text as `16 6x1/3/2 6x1/3/1` what its
selection model proposes. With --sweep, each product is timed alone, too, at these numbers of tokens, with each of PLANS
and with `registers`: weights in registers and 8 pairs of an expert. MLPs are first compared with the reference in
float32, products with `registers`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.graph_clock import Run, against, poisoned, rounds

from fastkernels.core import cuda_rtc
from fastkernels.core.spec import Case
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.moe import fused_experts_nvfp4, fused_experts_swigluoai
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe import mxfp4_prompt as many
from fastkernels.overrides.moe.fp4_selection import ranked
from fastkernels.overrides.moe.production import _MXFP4, _fused_experts_mxfp4
from fastkernels.overrides.moe.selection import Call
from fastkernels.overrides.routing.sorted_pairs import sort_pairs

T = torch.Tensor
LAYERS, ROUTINGS = 2, 2  # of a graph
LIMIT = 1e-2  # relative error: results of both products are rounded to bfloat16
# Format, experts, experts of a token, hidden and intermediate size. No kernel was tuned for the last two.
CASES = {
    "qwen3-30b": ("nvfp4", 128, 8, 2048, 768),
    "gpt-oss-20b": ("mxfp4", 32, 4, 2880, 2880),
    "gpt-oss-120b": ("mxfp4", 128, 4, 2880, 2880),
    "glm-4.5-air": ("nvfp4", 128, 8, 4096, 1408),
    "untuned-mxfp4": ("mxfp4", 48, 6, 2048, 1536),
    "untuned-nvfp4": ("nvfp4", 60, 4, 2560, 1280),
}
QUICK = {"hidden": 64, "intermediate": 96}
# For --sweep: pairs of a block, rows x parts / ahead / phases of it
PLANS = [
    f"{tokens} {block}"
    for tokens, blocks in (
        (8, "6x1/3/1 8x1/3/1 10x1/3/1 12x1/3/1"),
        (16, "6x1/3/1 6x1/3/2 8x1/3/2 10x1/3/1 10x1/3/2 10x1/2/2 12x1/2/2 12x1/2/1"),
        (24, "8x1/3/3 10x1/2/3"),
        (32, "8x1/3/3"),
    )
    for block in blocks.split()
]  # fmt: skip


class Format:
    """An op, the positions of weights and of routing among its arguments, and its products' kinds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.op: Any = fused_experts_swigluoai if name == "mxfp4" else fused_experts_nvfp4
        self.first, self.second = ((1, 7, 3), (2, 8, 4)) if name == "mxfp4" else ((1, 3, 5), (2, 4, 6))
        self.routed = 5 if name == "mxfp4" else 7
        self.glu, self.form = (1, few.MXFP4) if name == "mxfp4" else (2, few.NVFP4)

    def registers(self, k: int, topk: int, first: bool, is_sorted: bool = True) -> few.Plan:
        """Return the plan of a product with weights in registers."""
        made: few.Plan = few.plan(k, topk, is_sorted, self.glu if first else 0, form=self.form)
        return made._replace(ring=False, tokens=8 if is_sorted else 1)

    def proposed(self, name: str, tokens: int) -> list[str]:
        """Return the blocks that the selection model proposes for an MLP."""
        _, experts, topk, hidden, intermediate = CASES[name]
        call = Call(experts, experts, topk, hidden, intermediate, tokens)
        return [str(found) for found in ranked(call, self.glu, self.form)[:3]] if call.is_sorted else []

    def planned(self, block: str, k: int, topk: int, first: bool) -> few.Plan | None:
        """Return a product's plan of PLANS, None if it does not fit."""
        tokens, own = block.split()
        blocks = few.Blocks.parsed(f"{tokens} {own} {own}")
        made = blocks.plans(k, topk, k, self.glu, self.form)[0 if first else 1]
        return None if few.too_large(made) or made.threads * 48 > 65536 else made


def vllm_kernel(kind: str, args: list[Any]) -> Callable[..., T]:
    """Return a function that calls vLLM's kernel, with weights of these arguments as vLLM keeps them."""
    if kind == "mxfp4":
        return partial(_fused_experts_mxfp4(), prepared=[p.make(*args) for p in _MXFP4])
    return _marlin(args)


def _marlin(args: list[Any]) -> Callable[..., T]:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    x, w1, w2, w1_scale, w2_scale, w1_factor, w2_factor = args[:7]
    layer: Any = SimpleNamespace(
        num_experts=len(w1), hidden_size=x.shape[1], intermediate_size_per_partition=w1.shape[1] // 2,
        params_dtype=x.dtype,
    )  # fmt: skip
    first, first_scale, first_factor, second, second_scale, second_factor = (
        marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
            layer, w1, w1_scale, w1_factor[:, 0].clone(), w2, w2_scale, w2_factor[:, 0].clone(), True
        )
    )
    workspace = marlin_utils.marlin_make_workspace_new(x.device, 4)

    def call(x: T, *rest: Any) -> T:
        weights, ids = rest[6:8]
        result: T = fused_marlin_moe(
            x, first, second, None, None, first_scale, second_scale, weights, ids, scalar_types.float4_e2m1f.id,
            global_num_experts=len(w1), global_scale1=first_factor, global_scale2=second_factor, workspace=workspace,
        )  # fmt: skip
        return result

    return call


def routing(run: Run, tokens: int, experts: int, topk: int, skew: float) -> tuple[T, T]:
    """Return weights and ids. skew: the standard deviation of the experts' own logits; 0: all are as probable."""
    logits = run.randn(tokens, experts, dtype=torch.float32) + skew * run.randn(experts, dtype=torch.float32)
    weights, ids = logits.softmax(-1).topk(topk)
    return weights, ids.int()


class Layers:
    """The weights of a case's layers, for up to `most` tokens, and vLLM's calls with them."""

    def __init__(self, run: Run, name: str, most: int, skew: float) -> None:
        kind, experts, topk, hidden, intermediate = CASES[name]
        self.run, self.name, self.of, self.skew = run, name, Format(kind), skew
        sizes: dict[str, Any] = {
            "experts": experts,
            "topk": topk,
            "hidden": hidden,
            "intermediate": intermediate,
        }
        sizes.update(QUICK if run.quick else {})
        self.experts, self.topk = experts, topk
        run.op = self.of.op.SPEC.name
        case = Case(
            name, {"tokens": most, **sizes, **({"mxfp4": True} if kind == "mxfp4" else {})}, "bfloat16"
        )
        self.args = []
        for _ in range(LAYERS):
            args = list(self.of.op.SPEC.inputs(case, run.device, run.generator))[:9]
            if kind == "nvfp4":  # of vLLM's kernel, an expert has one factor
                args[5:7] = [f[:, :1].expand(f.shape).contiguous() for f in args[5:7]]
            self.args.append(args)
        self.vllm: list[Callable[..., T]] = []
        if run.cuda and find_spec("vllm") is not None:
            try:
                self.vllm = [vllm_kernel(kind, args) for args in self.args]
            except Exception as error:  # of another version's functions
                told = {"case": name, "skew": skew}
                run.row("time", "vllm", told, f"{type(error).__name__}: {str(error)[:200]}", "unsupported")

    def calls(self, tokens: int) -> list[list[Any]]:
        """Return the arguments of a graph's calls."""
        found = []
        for args in self.args:
            for _ in range(ROUTINGS):
                changed = list(args)
                changed[0] = args[0][:tokens].contiguous()
                changed[self.of.routed : self.of.routed + 2] = routing(
                    self.run, tokens, self.experts, self.topk, self.skew
                )
                found.append(changed)
        return found

    def measure(self, tokens: int) -> None:
        """Compare and time MLPs."""
        run, several = self.run, self.calls(tokens)
        told = {"case": self.name, "tokens": tokens, "skew": self.skew}
        calls: dict[str, list[Callable[..., T]]] = {
            "default": [self.of.op._cuda if run.cuda else self.of.op._torch] * LAYERS
        }
        for blocks in self.of.proposed(self.name, tokens) if run.cuda else ():
            calls[blocks] = [partial(self.of.op._cuda, blocks=blocks)] * LAYERS
        if self.vllm:
            calls["vllm"] = self.vllm
        want = self.of.op.reference(several[0][0].float(), *several[0][1:])
        for label, call in list(calls.items()):
            try:
                with poisoned():
                    error = ((call[0](*several[0]).float() - want).norm() / want.norm()).item()
            except Exception as raised:
                run.row("check", label, told, f"{type(raised).__name__}: {str(raised)[:200]}", "failed")
                del calls[label]
                continue
            if not error < LIMIT:
                run.row("check", label, told, f"its relative error is {error:.3g}, over {LIMIT}")
                del calls[label]
        todo: dict[str, list[Callable[[], Any]]] = {
            label: [partial(call[i // ROUTINGS], *args) for i, args in enumerate(several)]
            for label, call in calls.items()
        }
        self.report("time", told, rounds(run, todo), len(several))

    def sweep(self, tokens: int) -> None:
        """Compare and time each product alone with each plan."""
        for first in (True, False):
            several, columns = [], 2 * self.args[0][1 if first else 2].shape[2]
            for args in self.calls(tokens):
                ids, weights = args[self.of.routed + 1], args[self.of.routed]
                a = args[0] if first else self.run.randn(ids.numel(), columns)
                several.append(
                    (a, *(args[i] for i in (self.of.first if first else self.of.second)), weights, ids)
                )
            topk = self.topk if first else 1
            plans = {"registers": self.of.registers(columns, topk, first)}
            for block in PLANS:
                if (made := self.of.planned(block, columns, topk, first)) is not None:
                    plans[block] = made
            told = {
                "case": self.name,
                "tokens": tokens,
                "skew": self.skew,
                "product": "first" if first else "second",
            }
            todo: dict[str, list[Callable[[], Any]]] = {}
            want = None
            for label, p in plans.items():
                sorted_pairs = [sort_pairs(call[5], self.experts, None, p.tokens) for call in several]
                calls = [
                    partial(
                        few.mxfp4_gemm,
                        *call[:4],
                        pairs,
                        p,
                        None if first else call[4].reshape(-1),
                        1.702,
                        7.0,
                    )
                    for call, pairs in zip(several, sorted_pairs, strict=True)
                ]
                try:
                    with poisoned():
                        got = calls[0]().float()
                except Exception as raised:
                    self.run.row(
                        "check", label, told, f"{type(raised).__name__}: {str(raised)[:200]}", "failed"
                    )
                    continue
                want = got if want is None else want
                error = ((got - want).norm() / want.norm()).item()
                if not error < LIMIT:
                    self.run.row("check", label, told, f"its relative error is {error:.3g}, over {LIMIT}")
                    continue
                todo[label] = list(calls)
            self.report("product", told, rounds(self.run, todo), len(several))

    def report(self, kind: str, told: dict[str, Any], times: dict[str, list[float]], count: int) -> None:
        """Write a row of each time."""
        for label, us in times.items():
            gains = {
                f"speedup_{other}": against(us, times[other])
                for other in ("default", "registers", "vllm")
                if other in times and other != label
            }
            self.run.row(
                kind, label, told, us=statistics.median(us) / count,
                ci95={m: gain[1] for m, gain in gains.items()}, **{m: gain[0] for m, gain in gains.items()},
            )  # fmt: skip


def compile_ahead(names: list[str], tokens: list[int], sweep: bool) -> None:
    """Compile all kernels in processes, before CUDA is in use here: they are read from the cache folder then."""
    found: set[few.Plan | many.Plan] = set()
    for name in names:
        kind, experts, topk, hidden, inner = CASES[name]
        of = Format(kind)
        shapes = (experts, 2 * inner, hidden // 2), (experts, hidden, inner // 2)
        w1, w2 = (torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes)
        for first, k, each in ((True, hidden, topk), (False, inner, 1)):
            found.update(of.registers(k, each, first, is_sorted) for is_sorted in (True, False))
            if sweep:
                found.update(p for block in PLANS if (p := of.planned(block, k, each, first)) is not None)
        for n in tokens:
            ids = torch.empty(n, topk, dtype=torch.int32, device="meta")
            for blocks in (None, *of.proposed(name, n)):
                found.update(of.op._plans(ids, w1, w2, None, blocks))
    jobs = [
        (
            many.source() if isinstance(p, many.Plan) else text(few.COMMON, few.SOURCE),
            ("--gpu-architecture=sm_90a", *p.options),
        )
        for p in found
    ]
    with multiprocessing.get_context("fork").Pool(max((os.cpu_count() or 2) - 2, 1)) as pool:
        pool.starmap(cuda_rtc.cubin, jobs)
    print(f"{len(jobs)} kernels are compiled", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="file of rows (JSONL), which are appended")
    parser.add_argument("--seconds", type=float, default=300, help="time limit")
    parser.add_argument(
        "--cases", default="qwen3-30b,gpt-oss-20b,gpt-oss-120b", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--tokens", default="1,8,16,32,64,128")
    parser.add_argument("--sweep", default="", help="numbers of tokens at which products are timed alone")
    parser.add_argument(
        "--skew", type=float, default=0.0, help="standard deviation of the experts' own logits"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := [name for name in cases if name not in CASES]:
        parser.error(f"--cases: {', '.join(unknown)} is not one of {', '.join(CASES)}")
    tokens, sweep = ([int(n) for n in given.split(",") if n] for given in (options.tokens, options.sweep))
    if options.device == "cuda":
        compile_ahead(cases, tokens, bool(sweep))
    run = Run("fp4_experts", "", options)
    run.common["baseline"] = "vllm"
    for name in cases:
        layers = Layers(run, name, max(tokens + sweep), options.skew)
        for measure, counts in ((layers.sweep, sweep if run.cuda else []), (layers.measure, tokens)):
            for n in counts:
                if run.left() < 0:
                    print(f"the time is up before {name} with {n} tokens", file=sys.stderr)
                    return 1
                measure(n)
        del layers
    return bool(run.wrong)


if __name__ == "__main__":
    sys.exit(main())
