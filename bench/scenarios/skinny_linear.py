"""The kernels of `linear` for few tokens on this GPU beside cuBLAS: right first, then timed. Needs torch and triton.

    python bench/scenarios/skinny_linear.py --out rows.jsonl [--seconds 240] [--tokens 1,8,16,32,64,2,4]

Compiles all sets of parameters in parallel, compares each with float64 on odd and on model shapes, and tries what is
special about them: equal bits in equal calls, graphs that share a device, a kernel that starts while the one before
ends. Then times cuBLAS and every set that is right: a model's own layers one after the other in a CUDA graph, so that
no weight is in L2, the slope between n and 2n replays, interleaved. After each number of tokens it prints the sum over
a step, and the time of a graph of all linear layers of a step. Mixtral's qkv and o have Llama's shapes.
--device cpu --quick runs all of it on tiny shapes, interpreted (TRITON_INTERPRET=1): the times mean nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from graph_clock import Run, measure, poisoned

from fastkernels.overrides.l1 import _skinny_linear_triton as skinny

Shape = tuple[int, int]  # N, K
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# layer: (N, K, how many in a step)
MODELS: dict[str, dict[str, tuple[int, int, int]]] = {
    "llama-8b": {
        "qkv": (6144, 4096, 32), "o": (4096, 4096, 32), "gate_up": (28672, 4096, 32), "down": (4096, 14336, 32),
        "lm_head": (128256, 4096, 1),
    },
    "qwen3-8b": {
        "qkv": (6144, 4096, 36), "o": (4096, 4096, 36), "gate_up": (24576, 4096, 36), "down": (4096, 12288, 36),
        "lm_head": (151936, 4096, 1),
    },
}  # fmt: skip
TINY = {"tiny": {"a": (48, 64, 2), "b": (33, 264, 1)}}
ODD: tuple[Shape, ...] = ((130, 200), (33, 264))
CHECKED = (1, 2, 3, 4, 7, 8, 16, 17, 32, 64)
PDL = 4
LIMITS = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of the op's own SPEC, absolute and relative


def label(params: dict[str, Any]) -> str:
    return "/".join(str(v) for v in params.values())


def kernels(
    run: Run | None = None,
) -> dict[str, tuple[Callable[..., torch.Tensor], tuple[dict[str, Any], ...]]]:
    """Provider: its function and its sets of parameters."""
    sets = skinny.PARAMS
    if run is not None and run.quick:
        sets = tuple({(p["variant"], p["split_k"] > 1): p for p in sets if p["block_m"] <= 16}.values())
    return {"triton-skinny": (skinny.linear_skinny, sets)}


class _Compiles:
    """Stands for the kernel: compiles what would be launched, into Triton's cache."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel.warmup, grid=grid)


def compile_share(part: int, parts: int, sizes: list[int]) -> None:
    """Every `parts`-th of all that will be launched: the odd shapes, and these K with and without overlap."""
    skinny._skinny_kernel = _Compiles(skinny._skinny_kernel)
    jobs: list[tuple[Shape, torch.dtype, dict[str, Any]]] = []
    for p in skinny.PARAMS:
        jobs += [((256, k), torch.bfloat16, {**p, "pdl": pdl}) for k in sizes for pdl in (0, PDL)]
        jobs += [(shape, torch.bfloat16, p) for shape in ODD[: 1 if sizes else 0]]
    for (n, k), dtype, p in jobs[part::parts]:
        x = torch.empty(p["block_m"], k, dtype=dtype, device="cuda")
        weight = torch.empty(n, k, dtype=dtype, device="cuda")
        with contextlib.suppress(Exception):  # said where it is run
            bias = torch.empty(n, dtype=dtype, device="cuda") if (n, k) in ODD else None
            skinny.linear_skinny(x, weight, bias, **p)


def compile_all(sizes: list[int]) -> list[subprocess.Popen[bytes]]:
    parts = max(1, (os.cpu_count() or 2) - 2)
    sizes_text = ",".join(map(str, sizes))
    command = [sys.executable, __file__, "--out", os.devnull, "--compile"]
    return [subprocess.Popen([*command, f"{i}/{parts}/{sizes_text}"]) for i in range(parts)]


def problem(call: Callable[[], torch.Tensor], want: torch.Tensor) -> str:
    """'' if the call gives `want` (float64), twice the same bits; else what is wrong."""
    try:
        first, second = call(), call()
        if not torch.equal(first, second):
            return "two equal calls have other bits"
        limit = LIMITS[first.dtype]
        error = (first.double() - want).abs()
        if not bool((error <= limit + limit * want.abs()).all()):
            return f"largest error {error.max().item():.3g}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def check(run: Run, shape: Shape, dtype: torch.dtype, odd: bool) -> None:
    """All sets on one shape: those meant for so many tokens; on odd shapes with a bias, and all with 17 tokens."""
    n, k = shape
    x, weight = run.randn(64, k, dtype=dtype), run.randn(n, k, dtype=dtype, scale=k**-0.5)
    bias = run.randn(n, dtype=dtype) if odd else None
    want = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0.0)
    for provider, (fn, sets) in kernels(run).items():
        done = 0
        for p in sets:
            for m in CHECKED:
                if not (skinny.fits(p, m, k) or (odd and m == 17)) or (run.quick and m not in (2, 16)):
                    continue
                with poisoned():
                    wrong = problem(lambda p=p, m=m, fn=fn: fn(x[:m], weight, bias, **p), want[:m])
                done += 1
                if wrong:
                    run.bad.add((provider, label(p)))
                    case = {"tokens": m, "out": n, "in": k, "dtype": str(dtype)[6:], "params": label(p)}
                    run.row("check", provider, case, wrong)
                if "CUDA error" in wrong:
                    raise SystemExit("the GPU's context is lost: nothing more can be measured")
        run.row("check", provider, {"out": n, "in": k, "dtype": str(dtype)[6:], "bias": odd}, cases=done)


def special(run: Run) -> None:
    """Graphs: layers that overlap must not read x too early; two graphs at once must not share tickets."""
    n = k = 512
    weights = [run.randn(n, k, scale=k**-0.5) for _ in range(8)]
    fn, sets = kernels(run)["triton-skinny"]
    picked = {(p["variant"], p["block_m"], p["split_k"] > 1): p for p in sets}
    for p in picked.values():
        m = p["block_m"]
        x = [run.randn(m, k), run.randn(m, k)]

        def chain(start: torch.Tensor, p: dict[str, Any] = p, **more: Any) -> torch.Tensor:
            for w in weights:
                start = fn(start, w, **{**p, **more})
            return start

        try:
            want = [chain(start) for start in x]
            chain(x[0], pdl=PDL)
            graphs, outs = [], []
            for start in x:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    outs.append(chain(start, pdl=PDL))
                graphs.append(graph)
            streams = [torch.cuda.Stream() for _ in x]
            wrong = ""
            for _ in range(20):
                for graph, stream in zip(graphs, streams, strict=True):
                    with torch.cuda.stream(stream):
                        for _ in range(5):
                            graph.replay()
                torch.cuda.synchronize()
                if not all(torch.equal(a, b) for a, b in zip(outs, want, strict=True)):
                    wrong = (
                        "graphs replayed side by side, with overlap, have other bits than eager calls without"
                    )
                for out in outs:
                    out.fill_(float("nan"))
                torch.cuda.synchronize()
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[:200]}"
        run.row("graphs", "triton-skinny", {"tokens": m, "params": label(p)}, wrong, quiet=True)
    run.row("graphs", "triton-skinny", {"sets": len(picked)}, cases=len(picked))


def time_layer(
    run: Run, layer: str, weights: list[torch.Tensor], m: int, best: dict[str, dict[str, tuple[float, Call]]]
) -> None:  # fmt: skip
    """cuBLAS and every right set on one layer's weights; the best of each kind goes to best[layer]."""
    n, k = weights[0].shape
    x = run.randn(m, k)
    rotated = weights if len(weights) > 1 else weights * 4  # one alone is many times L2
    named: dict[str, tuple[str, dict[str, Any], Call]] = {"cublas": ("cublas", {}, F.linear)}
    for provider, (fn, sets) in kernels(run).items():
        for p in sets:
            if skinny.fits(p, m, k) and (provider, label(p)) not in run.bad:
                named[f"{provider} {label(p)}"] = (provider, p, partial(fn, **p))
    times = measure_named(run, named, x, rotated)
    ours = sorted((name for name in times if name != "cublas"), key=times.__getitem__)
    if run.cuda:
        overlapped = {}
        for name in ours[:3]:
            provider, p, _ = named[name]
            more = {**p, "pdl": PDL}
            overlapped[f"{provider} {label(more)}"] = (
                provider,
                more,
                partial(kernels()[provider][0], **more),
            )
        named |= overlapped
        times |= measure_named(run, overlapped, x, rotated)
    size = 2 * (n * k + m * (n + k))
    for name, us in times.items():
        provider, p, _ = named[name]
        case = {"tokens": m, "layer": layer, "out": n, "in": k, "params": label(p)}
        run.row("time", provider, case, us=us, tb_per_s=size / us / 1e6)
    kinds = {"cublas": ["cublas"], "best": ours, "best+pdl": [x for x in times if named[x][1].get("pdl")]}
    found = best[layer] = {}
    for kind, names in kinds.items():
        if names:
            first = min(names, key=times.__getitem__)
            found[kind] = (times[first], named[first][2])


def measure_named(
    run: Run, named: dict[str, tuple[str, dict[str, Any], Call]], x: torch.Tensor, weights: list[torch.Tensor]
) -> dict[str, float]:  # fmt: skip
    passes = measure(
        run, {name: [partial(call, x, w) for w in weights] for name, (_, _, call) in named.items()}
    )
    return {name: us / len(weights) for name, us in passes.items()}


def time_model(run: Run, model: str, tokens: list[int]) -> None:
    layers = {**MODELS, **TINY}[model]
    weights = {
        name: [run.randn(n, k, scale=k**-0.5) for _ in range(count)] for name, (n, k, count) in layers.items()
    }
    for m in tokens:
        best: dict[str, dict[str, tuple[float, Call]]] = {}
        for layer in layers:
            if run.left() <= 0:
                run.row(
                    "time", "all", {"model": model, "tokens": m, "layer": layer}, "out of time", "skipped"
                )
                return
            time_layer(run, layer, weights[layer], m, best)
        for kind in ("cublas", "best", "best+pdl"):
            if all(kind in found for found in best.values()):
                total = sum(layers[name][2] * found[kind][0] for name, found in best.items())
                run.row("sum", kind, {"model": model, "tokens": m}, ms=1e-3 * total)
        step(run, model, m, weights, best)


def step(
    run: Run, model: str, m: int, weights: dict[str, list[torch.Tensor]],
    best: dict[str, dict[str, tuple[float, Call]]],
) -> None:  # fmt: skip
    """All linear layers of a step, layer by layer, in one graph."""
    inputs = {name: run.randn(m, made[0].shape[1]) for name, made in weights.items()}
    depth = max(len(made) for made in weights.values())
    order = [(name, made[i]) for i in range(depth) for name, made in weights.items() if i < len(made)]
    order.sort(key=lambda item: item[0] == "lm_head")  # the last of a step
    todo = {}
    for kind in ("cublas", "best", "best+pdl"):
        if all(kind in found for found in best.values()):
            todo[kind] = [partial(best[name][kind][1], inputs[name], w) for name, w in order]
    for kind, us in measure(run, todo).items():
        run.row("step", kind, {"model": model, "tokens": m, "launches": len(order)}, ms=1e-3 * us)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--tokens", default="1,8,16,32,64,2,4")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, fewer sets")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        part, parts, sizes = options.compile.split("/")
        compile_share(int(part), int(parts), [int(s) for s in sizes.split(",") if s])
        return
    run, begin = Run("skinny_linear", "linear", options), time.monotonic()
    models = list(TINY if run.quick else MODELS)
    shapes = {(n, k): None for model in models for n, k, _ in {**MODELS, **TINY}[model].values()}
    later: list[subprocess.Popen[bytes]] = []
    with torch.inference_mode():
        if run.cuda and not run.quick:
            for worker in compile_all([4096, 14336]):
                worker.wait()
            later = compile_all([12288])
            print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        for shape in ODD[: 1 if run.quick else 2]:
            check(run, shape, torch.bfloat16, True)
        check(run, ODD[1], torch.float16, True)
        if run.cuda:
            special(run)
        for shape in shapes:
            check(run, shape, torch.bfloat16, False)
        print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
        for worker in later:
            worker.wait()
        for model in models:
            time_model(run, model, [int(t) for t in options.tokens.split(",")])
    print(f"{run.wrong} wrong", flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
