"""Check our CUDA kernel for 4-bit weights on this GPU, integers or NVFP4, then time it against vLLM's Marlin.

    linear_int4.py --out rows.jsonl [--seconds 300] [--tokens 1,4,8,16,32] [--layers 28672x4096,4096x14336]
        [--groups 128,64] [--zeros] [--dtype bfloat16] [--plans] [--nvfp4]

Times are microseconds a call: a CUDA graph calls a kernel with many copies of x, a weight and its scales, together
larger than L2, and kernels take turns. `us` is without anything between calls; `us_after` has a small kernel before
each call, which writes x, as in an engine, and whose own time is the row `producer`. --plans also times other plans of
our kernel, compiled in parallel. Marlin is left out where vLLM is not installed. --device cpu --quick times the Triton
kernel on tiny shapes in Triton's interpreter, which means nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.graph_clock import Run, against, poisoned, rounds

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear import linear_int4 as int4
from fastkernels.overrides.linear import linear_nvfp4 as nvfp4
from fastkernels.overrides.linear.kernels import int4_linear_cuda as few
from fastkernels.overrides.linear.production import _marlin, _marlin_weights

# Four of Llama-3.1-8B, two of Qwen2.5-7B, two of Qwen2.5-32B, one of Llama-3.3-70B and one of Qwen3-4B
LAYERS = (
    "6144x4096,4096x4096,28672x4096,4096x14336,37888x3584,3584x18944,5120x5120,27648x5120,8192x8192,2560x9728"
)
COPIES = 300 << 20  # bytes of a weight's copies: six times the L2 of an H100
LIMIT = 6e-3  # relative error: both kernels round weights or sums to 16 bits
Call = Callable[..., torch.Tensor]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # None: no zero points


def inputs(run: Run, case: dict[str, Any]) -> list[Inputs]:
    """Return copies of x, weight, scales and zero points, or factors, with different values."""
    n, k, group = case["n"], case["k"], case["group"]
    dtype = getattr(torch, case["dtype"])
    bytes_ = partial(torch.randint, dtype=torch.uint8, device=run.device, generator=run.generator)

    def one() -> Inputs:
        scale = torch.rand(n, k // group, device=run.device, generator=run.generator) * k**-0.5
        zero = bytes_(0, 16, (n, k // group)) if case["zeros"] else None
        x, weight = run.randn(case["tokens"], k, dtype=dtype), bytes_(0, 256, (n, k // 2))
        if case["nvfp4"]:
            scale = torch.rand(n, k // nvfp4.GROUP, device=run.device, generator=run.generator) * 400
            factor = torch.full((n,), 1e-3 * k**-0.5, device=run.device)  # of Marlin, one for the matrix
            return x, *nvfp4.from_checkpoint(weight, scale.to(torch.float8_e4m3fn)), factor
        return x, weight, scale.to(dtype), zero

    return [one() for _ in range(COPIES // (n * k // 2) + 1 if run.cuda else 2)]


def marlin_nvfp4(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> Call:
    """Return a call of vLLM's product, with the weight as vLLM prepares it at load."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

    n, k = weight.shape[0], x.shape[1]
    layer: Any = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition, layer.params_dtype = n, k, x.dtype
    q = int4.unpack_int4(int4.untiled(weight, int4.STEP))
    layer.weight = torch.nn.Parameter(q[:, ::2] | q[:, 1::2] << 4, requires_grad=False)
    scales = int4.untiled(scale.view(torch.uint8), 2).view(scale.dtype)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    layer.weight_global_scale = torch.nn.Parameter(factor[0].clone(), requires_grad=False)
    fp4.prepare_fp4_layer_for_marlin(layer)
    return partial(
        fp4.apply_fp4_marlin_linear, x, layer.weight, layer.weight_scale, layer.weight_global_scale,
        marlin_make_workspace_new(x.device), n, k,
    )  # fmt: skip


def kernels(
    run: Run, copies: list[Inputs], params: list[dict[str, int]], is_nvfp4: bool
) -> dict[str, list[Callable[[], Any]]]:
    """{kernel: a call for each copy}"""
    ours: Call = few.linear_int4_cuda if run.cuda else int4.linear_int4_triton
    if is_nvfp4:
        ours = nvfp4.linear_nvfp4_cuda if run.cuda else nvfp4.linear_nvfp4_cublas
    found = {"cuda" if run.cuda else "triton": [partial(ours, *c) for c in copies]}
    for p in params:
        name = "cuda " + ",".join(f"{key}={value}" for key, value in p.items())
        found[name] = [partial(ours, *c, **p) for c in copies]
    if find_spec("vllm") is not None and is_nvfp4:
        found["marlin"] = [marlin_nvfp4(*c) for c in copies]  # type: ignore[arg-type]
    elif find_spec("vllm") is not None:
        marlin: Call = _marlin()
        found["marlin"] = [partial(marlin, c[0], prepared=(_marlin_weights(*c), None)) for c in copies]
    return found


def after(producer: Callable[[], Any], call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call of both."""

    def both() -> None:
        producer()
        call()

    return both


def plans(case: dict[str, Any]) -> list[dict[str, int]]:
    """Return parameters of our kernel that suit this case, apart from those that it chooses."""
    return [p for p in few.PARAMS if few.fits(p, case["tokens"], case["n"], case["k"])]


def compile_plans(cases: list[dict[str, Any]]) -> None:
    """Fill the cache of compiled kernels."""
    wanted = {
        few.plan(
            c["tokens"],
            c["n"],
            c["k"],
            c["group"],
            c["zeros"],
            bf16=c["dtype"] == "bfloat16",
            fp4=c["nvfp4"],
            **p,
        ).options
        for c in cases
        for p in ({}, *plans(c))
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda o: cuda_rtc.cubin(text(few.SOURCE), ("--gpu-architecture=sm_90a", *o)), wanted))


def measure(run: Run, case: dict[str, Any], params: list[dict[str, int]]) -> None:
    copies = inputs(run, case)
    x, weight, scale, zero = copies[0]
    if case["nvfp4"]:
        assert zero is not None
        want = nvfp4.reference(x.float(), weight, scale, zero)
    else:
        want = int4.reference(x.float(), weight, scale.float(), zero)
    calls, errors = kernels(run, copies, params, case["nvfp4"]), {}
    for name, each in list(calls.items()):
        with poisoned():
            error = ((each[0]().float() - want).norm() / want.norm()).item()
        errors[name] = error
        if not error < LIMIT:
            run.row("check", name, case, f"its relative error is {error:.3g}, over {LIMIT}")
            del calls[name]
    times = rounds(run, calls)
    source = x.clone()
    producers = [partial(torch.mul, source, 1.0, out=c[0]) for c in copies]
    behind = {name: list(map(after, producers, each)) for name, each in calls.items()}
    later = rounds(run, {"producer": producers, **behind})
    run.row("time", "producer", case, us=statistics.median(later["producer"]) / len(copies))
    for name in (name for name in times if name in later):
        samples = times[name]
        both, gains, ci95 = {"us": samples, "us_after": later[name]}, {}, {}
        if "marlin" in times and "marlin" in later and name != "marlin":
            for metric, mine, theirs in (
                ("speedup", samples, times["marlin"]), ("speedup_after", later[name], later["marlin"])
            ):  # fmt: skip
                gains[metric], ci95[metric] = against(mine, theirs)
        us = {metric: statistics.median(each) / len(copies) for metric, each in both.items()}
        run.row("time", name, case, ci95=ci95, error=errors[name], **us, **gains)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="file of rows (JSONL), which are appended")
    parser.add_argument("--seconds", type=float, default=300, help="time limit")
    parser.add_argument("--tokens", default="1,4,8,16,32")
    parser.add_argument("--layers", default=LAYERS, help="NxK: outputs and inputs")
    parser.add_argument("--groups", default="128", help="columns that share a scale")
    parser.add_argument("--zeros", action="store_true", help="with zero points, as AWQ")
    parser.add_argument("--nvfp4", action="store_true", help="NVFP4 weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--plans", action="store_true", help="time all plans of our kernel")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one tiny layer")
    options = parser.parse_args()
    run = Run("linear_int4", "linear_nvfp4" if options.nvfp4 else "linear_int4", options)
    run.common["baseline"] = "marlin"
    if find_spec("vllm") is None:
        print("Marlin is left out: vLLM is not installed")
    cases = [
        {
            "tokens": int(tokens), "n": int(layer.split("x")[0]), "k": int(layer.split("x")[1]), "group": int(group),
            "zeros": options.zeros, "dtype": options.dtype, "nvfp4": options.nvfp4,
        }
        for tokens in options.tokens.split(",")
        for layer in (["48x256"] if options.quick else options.layers.split(","))
        for group in (["32"] if options.nvfp4 else options.groups.split(","))
    ]  # fmt: skip
    every = options.plans and run.cuda
    if every:
        compile_plans(cases)
    for case in cases:
        if run.left() < 0:
            print(f"the time is up before {case}", file=sys.stderr)
            return 1
        measure(run, case, plans(case) if every else [])
    return bool(run.wrong)


if __name__ == "__main__":
    sys.exit(main())
