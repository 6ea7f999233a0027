"""Time experts with MXFP4 and NVFP4 weights: our CUDA kernel and vLLM's.

    fp4_experts.py --out rows.jsonl [--cases gpt-oss-20b,qwen3-30b] [--tokens 1,8,32,64] [--skew 1]

A case names a format and sizes, see CASES. Times are microseconds of an MLP: a CUDA graph has calls of two layers with
several routings, and kernels take turns. Results are first compared with the reference in float32.
"""

from __future__ import annotations

import argparse
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

from fastkernels.core.spec import Case
from fastkernels.overrides.moe import fused_experts_nvfp4, fused_experts_swigluoai
from fastkernels.overrides.moe.production import _MXFP4, _fused_experts_mxfp4

T = torch.Tensor
LAYERS, ROUTINGS = 2, 2  # of a graph
LIMIT = 1e-2  # relative error: results of both products are rounded to bfloat16
# Format, experts, experts of a token, hidden and intermediate size. No kernel was tuned for the last two.
CASES = {
    "gpt-oss-20b": ("mxfp4", 32, 4, 2880, 2880),
    "gpt-oss-120b": ("mxfp4", 128, 4, 2880, 2880),
    "qwen3-30b": ("nvfp4", 128, 8, 2048, 768),
    "glm-4.5-air": ("nvfp4", 128, 8, 4096, 1408),
    "untuned-mxfp4": ("mxfp4", 48, 6, 2048, 1536),
    "untuned-nvfp4": ("nvfp4", 60, 4, 2560, 1280),
}
QUICK = {"hidden": 64, "intermediate": 96}


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


def measure(run: Run, name: str, tokens: int, skew: float) -> None:
    kind, experts, topk, hidden, intermediate = CASES[name]
    op: Any = fused_experts_swigluoai if kind == "mxfp4" else fused_experts_nvfp4
    routed = 5 if kind == "mxfp4" else 7  # the position of weights and ids among the arguments
    run.op = op.SPEC.name
    sizes: dict[str, Any] = {"experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate}
    sizes.update(QUICK if run.quick else {})
    case = Case(name, {"tokens": tokens, **sizes, **({"mxfp4": True} if kind == "mxfp4" else {})}, "bfloat16")
    layers, several = [], []
    for _ in range(LAYERS):
        args = list(op.SPEC.inputs(case, run.device, run.generator))[:9]
        if kind == "nvfp4":  # of vLLM's kernel, an expert has one factor
            args[5:7] = [f[:, :1].expand(f.shape).contiguous() for f in args[5:7]]
        layers.append(args)
    for args in layers:
        for _ in range(ROUTINGS):
            changed = list(args)
            changed[routed : routed + 2] = routing(run, tokens, experts, topk, skew)
            several.append(changed)
    told = {"case": name, "tokens": tokens, "skew": skew}
    ours = "cuda" if run.cuda else "torch"
    calls: dict[str, list[Callable[..., T]]] = {ours: [getattr(op, f"_{ours}")] * LAYERS}
    if run.cuda and find_spec("vllm") is not None:
        try:
            calls["vllm"] = [vllm_kernel(kind, args) for args in layers]
        except Exception as error:  # of another version's functions
            run.row("time", "vllm", told, f"{type(error).__name__}: {str(error)[:200]}", "unsupported")
    want = op.reference(several[0][0].float(), *several[0][1:])
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
    todo = {
        label: [partial(call[i // ROUTINGS], *args) for i, args in enumerate(several)] for label, call in calls.items()
    }  # fmt: skip
    times = rounds(run, todo)
    for label, us in times.items():
        gains = {"speedup_vllm": against(us, times["vllm"])} if "vllm" in times and label != "vllm" else {}
        run.row(
            "time", label, told, us=statistics.median(us) / len(several),
            ci95={m: gain[1] for m, gain in gains.items()}, **{m: gain[0] for m, gain in gains.items()},
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="file of rows (JSONL), which are appended")
    parser.add_argument("--seconds", type=float, default=300, help="time limit")
    parser.add_argument("--cases", default="gpt-oss-20b,qwen3-30b", help=f"of {', '.join(CASES)}")
    parser.add_argument("--tokens", default="1,8,32,64")
    parser.add_argument(
        "--skew", type=float, default=0.0, help="standard deviation of the experts' own logits"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := [name for name in cases if name not in CASES]:
        parser.error(f"--cases: {', '.join(unknown)} is not one of {', '.join(CASES)}")
    run = Run("fp4_experts", "", options)
    run.common["baseline"] = "vllm"
    for name in cases:
        for n in options.tokens.split(","):
            if run.left() < 0:
                print(f"the time is up before {name} with {n} tokens", file=sys.stderr)
                return 1
            measure(run, name, int(n), options.skew)
    return bool(run.wrong)


if __name__ == "__main__":
    sys.exit(main())
