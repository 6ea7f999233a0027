"""Check the kernels of `linear` for few tokens on this GPU, then time them against cuBLAS.

    skinny_linear.py --out rows.jsonl [--seconds 240] [--tokens 1,8,16,32,64,2,4] [--provider cuda-wgmma,cuda-skinny]
        [--model llama-8b]

Requires torch and triton. Compiles all parameter sets in parallel and compares each with float64 on odd and on model
shapes, including equal bits in equal calls, concurrent graphs, and early kernel starts. Then times cuBLAS and every
right set: a model's own layers one after the other in a CUDA graph, so that no weight is in L2, the slope between n and
2n interleaved replays. For each number of tokens it prints the sum over a step and the time of a graph of all linear
layers of a step. Mixtral's qkv and o have Llama's shapes. --device cpu --quick runs everything on tiny shapes in
Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
import torch.nn.functional as F
from experiments.common.graph_clock import Run, against, finish, poisoned, rounds
from experiments.common.kernel_check import other_bits, problem
from experiments.linear.linear_kernels import (
    CHECKED,
    CUDA_ODD,
    KERNELS,
    MODELS,
    ODD,
    TINY,
    Call,
    Sets,
    Shape,
    compile_share,
    label,
    only,
)  # fmt: skip

COMPILE_S, CHILD_S = 150, 120


def sets_of(run: Run, provider: str) -> Sets:
    """Return the provider's sets that passed so far; quick: one of each kind."""
    sets = KERNELS[provider].sets
    if run.quick and provider == "triton-skinny":
        kinds = {(p["variant"], p["split_k"] > 1): p for p in sets if p["block_m"] <= 16}
        sets = tuple(kinds.values())
    return tuple(p for p in sets if (provider, label(p)) not in run.bad)


def compile_all(sizes: list[int]) -> list[subprocess.Popen[bytes]]:
    parts = max(1, (os.cpu_count() or 2) - 2)
    sizes_text = ",".join(map(str, sizes))
    command = [sys.executable, __file__, "--out", os.devnull, *selected(), "--compile"]
    return [subprocess.Popen([*command, f"{i}/{parts}/{sizes_text}"]) for i in range(parts)]


def selected() -> list[str]:
    """Return the selection as arguments for child processes."""
    return ["--provider", ",".join(KERNELS), "--model", ",".join(MODELS)]


def check(run: Run, provider: str, sets: Sets, shape: Shape, dtype: torch.dtype, odd: bool) -> None:
    """Check the sets on one shape with their numbers of tokens and 17; odd shapes with a bias."""
    n, k = shape
    x, weight = run.randn(64, k, dtype=dtype), run.randn(n, k, dtype=dtype, scale=k**-0.5)
    bias = run.randn(n, dtype=dtype) if odd else None
    want = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0.0)
    kernel, done = KERNELS[provider], 0
    for p in sets:
        for m in CHECKED:
            left_over = odd and m == 17 and provider == "triton-skinny"
            if not (kernel.fits(p, m, k) or left_over) or (run.quick and m not in (2, 16)):
                continue
            with poisoned():
                wrong = problem(lambda p=p, m=m: kernel.fn(x[:m], weight, bias, **p), want[:m])
            done += 1
            if wrong:
                run.bad.add((provider, label(p)))
                case = {"tokens": m, "out": n, "in": k, "dtype": str(dtype)[6:], "params": label(p)}
                run.row("check", provider, case, wrong)
            if "CUDA error" in wrong or "CUDA_ERROR" in wrong:
                raise SystemExit("the GPU's context is lost: nothing more can be measured")
    if done:
        run.row("check", provider, {"out": n, "in": k, "dtype": str(dtype)[6:], "bias": odd}, cases=done)


def check_in_a_child(run: Run, provider: str) -> None:
    """Check a CUDA C++ kernel in a child, since a bug can hang or corrupt the context; keep only sets that passed."""
    kernel = KERNELS[provider]
    assert kernel.supports is not None
    probe = torch.empty(1, 64, dtype=torch.bfloat16, device=run.device)
    reason = kernel.supports(probe, probe)
    if reason is None:
        log = run.out.with_suffix(f".{provider}.log")
        command = [sys.executable, __file__, "--out", str(run.out), *selected(), "--check", provider]
        with open(log, "w") as file:
            child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            try:
                status = child.wait(CHILD_S)
                reason = f"its check ended with {status}" if status else None
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                reason = f"its check hung for {CHILD_S} s"
        if reason is not None:
            print(
                f"{reason}; the last lines of {log}:\n" + "".join(log.read_text().splitlines(True)[-8:]),
                flush=True,
            )
    passed = set()
    if run.out.exists():
        rows = [json.loads(line) for line in run.out.read_text().splitlines()]
        sets = [r for r in rows if r["case"]["kind"] == "set" and r["subject"]["provider"] == provider]
        passed = {r["case"]["params"] for r in sets if r["status"] == "ok"}
    run.bad |= {(provider, label(p)) for p in kernel.sets if label(p) not in passed}
    status = "ok" if passed and not reason else "failed" if run.cuda else "unsupported"
    run.row("child", provider, {}, reason or "", status, passed=len(passed))


def check_child(run: Run, provider: str, shapes: list[Shape]) -> None:
    """Check set after set in a child, so that results before a hang are known."""
    kernel = KERNELS[provider]
    for p in kernel.sets:
        print("trying", label(p), flush=True)
        for shape, dtype in CUDA_ODD:
            if shape[1] % kernel.k_of == 0:
                check(run, provider, (p,), shape, dtype, True)
        for shape in shapes:
            check(run, provider, (p,), shape, torch.bfloat16, False)
        for m in kernel.chained:
            if kernel.fits(p, m, 4096):
                graphs(run, provider, p, m)
        if (provider, label(p)) not in run.bad:
            run.row("set", provider, {"params": label(p)})


def graphs(run: Run, provider: str, p: dict[str, Any], m: int) -> None:
    """Check graphs: overlapping layers must not read x too early, and concurrent graphs must not share tickets."""
    n = k = 4096
    weights = [run.randn(n, k, scale=k**-0.5) for _ in range(8)]
    fn = KERNELS[provider].fn
    x = [run.randn(m, k), run.randn(m, k)]

    def alone(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return call(x, w)

    def chain(start: torch.Tensor, call: Call) -> torch.Tensor:
        for w in weights:
            start = call(start, w)
        return start

    call, wrong = partial(fn, **p), ""
    try:
        want = [chain(start, alone) for start in x]
        wrong = other_bits([partial(chain, start, call) for start in x], want)
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    if wrong:
        run.bad.add((provider, label(p)))
    run.row("graphs", provider, {"tokens": m, "params": label(p)}, wrong, quiet=True)


def check_triton(run: Run, shapes: list[Shape]) -> None:
    sets = sets_of(run, "triton-skinny")
    for shape, dtype in ODD:
        check(run, "triton-skinny", sets, shape, dtype, True)
    if run.cuda:
        for p in {(p["variant"], p["block_m"], p["split_k"] > 1): p for p in sets}.values():
            graphs(run, "triton-skinny", p, p["block_m"])
    for shape in shapes:
        check(run, "triton-skinny", sets, shape, torch.bfloat16, False)


def time_layer(
    run: Run, layer: str, weights: list[torch.Tensor], m: int, best: dict[str, dict[str, tuple[float, Call]]]
) -> None:  # fmt: skip
    """Time cuBLAS and every right set on one layer's weights; the best of each kind goes to best[layer]."""
    n, k = weights[0].shape
    x = run.randn(m, k)
    rotated = weights if len(weights) > 1 else weights * 4  # a single weight is many times larger than L2
    named: dict[str, tuple[str, dict[str, Any], Call]] = {"cublas": ("cublas", {}, F.linear)}
    for provider, kernel in KERNELS.items():
        for p in sets_of(run, provider):
            if kernel.fits(p, m, k):
                named[f"{provider} {label(p)}"] = (provider, p, partial(kernel.fn, **p))
    samples = rounds_named(run, named, x, rotated)
    times = {name: statistics.median(each) for name, each in samples.items()}
    ours = sorted((name for name in times if name != "cublas"), key=times.__getitem__)
    size = 2 * (n * k + m * (n + k))
    for name, us in times.items():
        provider, p, _ = named[name]
        case = {"tokens": m, "layer": layer, "out": n, "in": k, "params": label(p)}
        gain, ci95 = against(samples[name], samples["cublas"])
        run.row("time", provider, case, ci95={"speedup": ci95}, us=us, tb_per_s=size / us / 1e6, speedup=gain)
    kinds = {"cublas": ["cublas"], "best": ours}
    found = best[layer] = {}
    for kind, names in kinds.items():
        if names:
            first = min(names, key=times.__getitem__)
            found[kind] = (times[first], named[first][2])
            run.summary.append(f"{m:>3} tokens  {layer:<8} {kind:<9} {times[first]:8.2f} us  {first}")


def rounds_named(
    run: Run, named: dict[str, tuple[str, dict[str, Any], Call]], x: torch.Tensor, weights: list[torch.Tensor]
) -> dict[str, list[float]]:  # fmt: skip
    """Return microseconds of a call in each round."""
    passes = rounds(
        run, {name: [partial(call, x, w) for w in weights] for name, (_, _, call) in named.items()}
    )
    return {name: [us / len(weights) for us in each] for name, each in passes.items()}


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
        for kind in ("cublas", "best"):
            if all(kind in found for found in best.values()):
                total = sum(layers[name][2] * found[kind][0] for name, found in best.items())
                run.row("sum", kind, {"model": model, "tokens": m}, ms=1e-3 * total)
                run.summary.append(f"{m:>3} tokens  {model:<8} {kind:<9} {1e-3 * total:8.4f} ms, the sum")
        step(run, model, m, weights, best)


def step(
    run: Run, model: str, m: int, weights: dict[str, list[torch.Tensor]],
    best: dict[str, dict[str, tuple[float, Call]]],
) -> None:  # fmt: skip
    """Time all linear layers of a step, layer by layer, in one graph."""
    inputs = {name: run.randn(m, made[0].shape[1]) for name, made in weights.items()}
    depth = max(len(made) for made in weights.values())
    order = [(name, made[i]) for i in range(depth) for name, made in weights.items() if i < len(made)]
    order.sort(key=lambda item: item[0] == "lm_head")  # the last of a step
    todo = {}
    for kind in ("cublas", "best"):
        if all(kind in found for found in best.values()):
            todo[kind] = [partial(best[name][kind][1], inputs[name], w) for name, w in order]
    samples = rounds(run, todo)
    for kind, each in samples.items():
        us, (gain, ci95) = statistics.median(each), against(each, samples["cublas"])
        case = {"model": model, "tokens": m, "launches": len(order)}
        run.row("step", kind, case, ci95={"speedup": ci95}, ms=1e-3 * us, speedup=gain)
        run.summary.append(f"{m:>3} tokens  {model:<8} {kind:<9} {1e-3 * us:8.4f} ms, a step in one graph")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--tokens", default="1,8,16,32,64,2,4")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, fewer sets")
    parser.add_argument(
        "--provider", default="", help="comma-separated, in addition to cuBLAS (default: all)"
    )
    parser.add_argument("--model", default="", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # passed to child processes
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    only(options.provider, options.model)
    if options.compile:
        part, parts, sizes = options.compile.split("/")
        compile_share(int(part), int(parts), [int(s) for s in sizes.split(",") if s])
        return
    run, begin = Run("skinny_linear", "linear", options), time.monotonic()
    models = list(TINY if run.quick else MODELS)
    shapes = list({(n, k): None for model in models for n, k, _ in {**MODELS, **TINY}[model].values()})
    if options.check:
        with torch.inference_mode():
            check_child(run, options.check, shapes)
        raise SystemExit(1 if run.wrong else 0)
    later: list[subprocess.Popen[bytes]] = []
    with torch.inference_mode():
        if run.cuda and not run.quick:
            finish(compile_all([4096, 14336]), COMPILE_S)
            later = compile_all([12288])
            print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        for provider in (name for name, kernel in KERNELS.items() if kernel.supports):
            check_in_a_child(run, provider)
        if "triton-skinny" in KERNELS:
            check_triton(run, shapes)
        print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
        finish(later, COMPILE_S)
        for model in models:
            time_model(run, model, [int(t) for t in options.tokens.split(",")])
    print("\n".join(["", *run.summary, f"{run.wrong} wrong"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
