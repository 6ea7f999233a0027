"""Check our FP8 linear kernels on this GPU, then time them against production's (vLLM's and SGLang's).

    linear_fp8.py --out rows.jsonl [--seconds 300] [--tokens 1,8,16,32,64,128,256] [--scales row,tensor,block]
        [--production cutlass,deepgemm,cublas,flashinfer,sgl_kernel,vllm-triton] [--layers qkv,o,..]
        [--sets 1/4/128,1/4/128/64,..]

Requires torch and triton. Compiles all parameter sets of `cuda-wgmma-fp8` in parallel and compares each with float64 in
a child process: odd and model shapes, 1 to 64 tokens, scales per row, tensor and block, equal bits in equal calls, and
chains of layers in concurrent graphs. Installed production kernels are checked and timed too.

Times are of Llama-3.1-8B's layers one after the other in a CUDA graph, so that no weight is in L2: the slope between n
and 2n interleaved replays. Then all linear layers of a step in one graph (without lm_head, which is not quantized), in
us a layer, and `down` of half a layer of Llama and Qwen3-8B. Only the selected tokens, layers and sets are compiled and
checked. --device cpu --quick runs everything on tiny shapes in Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.graph_clock import Run, finish, measure, poisoned
from experiments.common.kernel_check import other_bits, problem
from experiments.linear.linear_fp8_plan import (
    CHAIN,
    GRAPHS,
    LAYERS,
    ODD,
    STEP,
    checked,
    compile_share,
    layers_of,
    sets_of,
)
from experiments.linear.linear_kernels import label
from fk_bench.core.baselines import Baseline, baselines

from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.linear.kernels import tiled_linear_cuda as tiled
from fastkernels.overrides.linear.kernels import wgmma_linear_fp8_cuda as wgmma
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, ROW, TENSOR, blocks
from fastkernels.overrides.linear.kernels.linear_fp8_triton import linear_fp8_triton
from fastkernels.overrides.linear.linear_fp8 import reference
from fastkernels.overrides.quant.quantize_fp8 import quantize_triton

OURS, TILED = "cuda-wgmma-fp8", "cuda-tiled-fp8"
COMPILE_S, CHILD_S, WARM_S = 120, 120, 180
LIMITS = dict.fromkeys(
    (torch.bfloat16, torch.float16), 1.6e-2
)  # largest error of our kernels, absolute and relative
THEIRS = 8e-2  # of kernels that accumulate in tensor cores only
KINDS = {"row": ROW, "tensor": TENSOR, "block": BLOCK}
TINY = {"a": (48, 256), "b": (33, 400)}
DEPTH, TINY_DEPTH = 32, 2
Call = Callable[..., torch.Tensor]
Weight = tuple[torch.Tensor, torch.Tensor]  # [N, K], its scales


def values(run: Run, *size: int) -> torch.Tensor:
    return run.randn(*size, scale=100.0).clamp_(-448, 448).to(FP8)


def x_of(run: Run, kind: int, m: int, k: int) -> Weight:
    """Return x [M, K] of variance 1 and its scales; block scales in the layout of the hosts' kernels."""
    scales = torch.empty(blocks(k) if kind == BLOCK else 1, -(-m // 4) * 4, device=run.device)
    scales = scales.uniform_(0.005, 0.015, generator=run.generator).t()[:m]
    scales = scales if kind == BLOCK else scales[:1, 0] if kind == TENSOR else scales.contiguous()
    return values(run, m, k), scales


def weight_scales(run: Run, kind: int, n: int, k: int) -> torch.Tensor:
    size = {BLOCK: (blocks(n), blocks(k)), ROW: (n,), TENSOR: (1,)}[kind]
    made = torch.empty(size, device=run.device).uniform_(0.5, 1.5, generator=run.generator)
    return made.mul_(0.01 * k**-0.5)


def stop_if_lost(wrong: str) -> None:
    if "CUDA error" in wrong or "CUDA_ERROR" in wrong:
        raise SystemExit("the GPU's context is lost: nothing more can be measured")


def check(
    run: Run, name: str, call: Call, kind: str, shape: tuple[int, int], tokens: list[int], odd: bool, params: str = ""
) -> bool:  # fmt: skip
    """Check one of our sets on one shape with all these tokens; odd shapes with a bias and in float16."""
    n, k = shape
    (x, x_scale), weight = x_of(run, KINDS[kind], 64, k), values(run, n, k)
    w_scale, dtype = weight_scales(run, KINDS[kind], n, k), torch.float16 if odd else torch.bfloat16
    bias = run.randn(n, dtype=dtype) if odd else None
    exact = [None if t is None else t.double() for t in (x, weight, x_scale, w_scale, bias)]
    want, right = reference(*exact), True
    for m in tokens:
        scale = x_scale if kind == "tensor" else x_scale[:m]
        with poisoned():
            wrong = problem(
                lambda m=m, s=scale: call(x[:m], weight, s, w_scale, bias, dtype), want[:m], LIMITS
            )
        if wrong:
            right = False
            case = {"scales": kind, "tokens": m, "out": n, "in": k, "params": params}
            run.row("check", name, case, wrong)
            stop_if_lost(wrong)
    if right:
        case = {"scales": kind, "out": n, "in": k, "params": params}
        run.row("check", name, case, quiet=True, cases=len(tokens))
    return right


def graphs(run: Run, p: dict[str, Any], kind: str, m: int) -> bool:
    """Check graphs: overlapping layers must not read x or its scales too early, nor share tickets."""
    n, k = CHAIN
    weights = [(values(run, n, k), weight_scales(run, KINDS[kind], n, k)) for _ in range(8)]
    starts, wrong = [run.randn(m, k), run.randn(m, k)], ""
    group, at = (128, (True, True)) if kind == "block" else (-1, (False, False))

    def chain(y: torch.Tensor, alone: bool) -> torch.Tensor:
        for weight, w_scale in weights:
            q, scale = quantize_triton(y, None, group, None, 1e-10, *at)
            if alone:
                torch.cuda.synchronize()
            y = wgmma.linear_fp8_wgmma(q, weight, scale, w_scale, **p)
        return y

    try:
        want = [chain(y, True) for y in starts]
        wrong = other_bits([partial(chain, y, False) for y in starts], want)
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    case = {"scales": kind, "tokens": m, "params": label(p)}
    run.row("graphs", OURS, case, wrong, quiet=True)
    stop_if_lost(wrong)
    return not wrong


# -- child processes: compilation and checks that may hang


def child(options: argparse.Namespace, *told: str) -> list[str]:
    known = [f"--{name}={getattr(options, name)}" for name in ("out", "scales", "tokens", "layers", "sets")]
    return [sys.executable, __file__, *known, *told]


def check_sets(run: Run, options: argparse.Namespace) -> None:
    """Check set after set in a child, so that results before a hang are known."""
    for p in sets_of(options):
        print("trying", label(p), flush=True)
        call, right = partial(wgmma.linear_fp8_wgmma, **p), True
        for kind in KINDS:
            for odd, shapes in ((True, ODD), (False, tuple(layers_of(options).values()))):
                if kind == "tensor" and not odd:
                    continue  # handled by the kernel for rows
                for shape in shapes:
                    tokens = [m for m in checked(options) if wgmma.fits(p, m, shape[1])]
                    right &= not tokens or check(run, OURS, call, kind, shape, tokens, odd, label(p))
            for m in GRAPHS:
                if kind != "tensor" and wgmma.fits(p, m, 4096):
                    right &= graphs(run, p, kind, m)
        if right:
            run.row("set", OURS, {"params": label(p)})


def right_sets(run: Run, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the sets that passed in a child; none on a CPU."""
    probe = [torch.zeros(1, 128, device=run.device).to(FP8)] * 2 + [torch.ones(1, device=run.device)] * 2
    reason = wgmma.supports_wgmma_fp8(*probe)
    most = min(CHILD_S, 0.5 * options.seconds)
    before = len(run.out.read_text().splitlines()) if run.out.exists() else 0
    if reason is None:
        log = run.out.with_suffix(".check.log")
        with open(log, "w") as file:
            process = subprocess.Popen(child(options, "--check"), stdout=file, stderr=subprocess.STDOUT)
            try:
                status = process.wait(most)
                reason = f"its check ended with {status}" if status else None
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                reason = f"its check hung for {most:.0f} s"
        if reason is not None:
            tail = "".join(log.read_text().splitlines(True)[-12:])
            print(f"{reason}; the last lines of {log}:\n{tail}", flush=True)
    lines = run.out.read_text().splitlines()[before:] if run.out.exists() else []
    sets = [row for row in map(json.loads, lines) if row["case"]["kind"] == "set"]
    passed = {row["case"]["params"] for row in sets if row["status"] == "ok"}
    status = "ok" if passed and not reason else "failed" if run.cuda else "unsupported"
    run.row("child", OURS, {}, reason or "", status, passed=len(passed))
    return [p for p in sets_of(options) if label(p) in passed]


def warm(run: Run, options: argparse.Namespace) -> None:
    """In a child: call libraries once, which compile their kernels into their own caches."""
    for baseline in production(options):
        for m in [int(t) for t in options.tokens.split(",")]:
            for n, k in layers_of(options).values():
                (x, x_scale), weight = x_of(run, BLOCK, m, k), values(run, n, k)
                args = (x, weight, x_scale, weight_scales(run, BLOCK, n, k))
                if baseline.supports(*args) is None:
                    baseline.fn(*args)
        torch.cuda.synchronize()
        print("warm", baseline.name, flush=True)


def production(options: argparse.Namespace) -> list[Baseline]:
    """Return the installed production baselines; on a CPU the reference."""
    found = [b for b in baselines("linear_fp8", "production", options.device) if b.available() is None]
    names = options.production.split(",")
    return [b for b in found if b.name in names or options.device == "cpu"]


# -- times


def measure_layers(run: Run, named: dict[str, Call], x: Weight, weights: list[Weight]) -> dict[str, float]:
    """Return microseconds a layer of each, over several weights."""
    (q, scale), todo = x, {}
    for name, call in named.items():
        todo[name] = [partial(call, q, w, scale, s) for w, s in weights]
    return {name: us / len(weights) for name, us in measure(run, todo).items()}


def usable(
    run: Run, kind: str, m: int, layer: str, found: list[Baseline], x: Weight, weight: Weight
) -> dict[str, Call]:
    """Return the production baselines that support the call and are right; print every RMS error."""
    args = (x[0], weight[0], x[1], weight[1])
    want, calls = reference(*(t.double() for t in args)), {}
    case = {"scales": kind, "tokens": m, "layer": layer}
    ours = [
        ("triton", None, linear_fp8_triton),
        (OURS, wgmma.supports_wgmma_fp8, wgmma.linear_fp8_wgmma),
        (TILED, tiled.supports_tiled_fp8, tiled.linear_fp8_tiled),
    ]
    for name, supports, fn in [*((b.name, b.supports, b) for b in found), *ours]:
        try:
            refused = supports(*args) if supports else None
            if refused:
                run.row("error", name, case, refused, "unsupported", quiet=True)
                continue
            error = ((fn.fn if isinstance(fn, Baseline) else fn)(*args).double() - want).abs()
            over = not bool((error <= THEIRS + THEIRS * want.abs()).all())
            reason = f"largest error {error.max().item():.3g}" if over else ""
            rms = (error.pow(2).mean() / want.pow(2).mean()).sqrt().item()
            run.row(
                "error", name, case, reason, "unsupported" if over else "ok", rms=rms, max=error.max().item()
            )
            if isinstance(fn, Baseline) and not over:
                calls[name] = fn.fn
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[:200]}"
            run.row("error", name, case, wrong, "unsupported")
            stop_if_lost(wrong)
    return calls


def time_point(
    run: Run, kind: str, m: int, weights: dict[str, list[Weight]], found: list[Baseline], sets: list[dict[str, Any]]
) -> None:  # fmt: skip
    """Time all layers at m tokens: each provider and set, then a step of each provider that has all layers."""
    inputs = {layer: x_of(run, KINDS[kind], m, made[0][0].shape[1]) for layer, made in weights.items()}
    chosen: dict[str, dict[str, Call]] = {}
    for layer, made in weights.items():
        if run.left() <= 0:
            run.row("time", "all", {"scales": kind, "tokens": m, "layer": layer}, "out of time", "skipped")
            return
        n, k = made[0][0].shape
        others = usable(run, kind, m, layer, found, inputs[layer], made[0])
        named: dict[str, Call] = {**others, "triton": linear_fp8_triton}
        ours = {f"{OURS} {label(p)}": p for p in sets if wgmma.fits(p, m, k)} if m <= 64 else {}
        if kind == "block" and m > 64:
            named[TILED] = tiled.linear_fp8_tiled
        if ours:
            named[f"{OURS} default"] = wgmma.linear_fp8_wgmma
        named.update({name: partial(wgmma.linear_fp8_wgmma, **p) for name, p in ours.items()})
        times = measure_layers(run, named, inputs[layer], made)
        size = n * k + m * k + 2 * m * n
        for name, us in times.items():
            provider, _, params = name.partition(" ")
            case = {"scales": kind, "tokens": m, "layer": layer, "out": n, "in": k, "params": params}
            run.row("time", provider, case, us=us, tb_per_s=size / us / 1e6)
        groups = {
            "production": [n for n in times if n in others], OURS: [n for n in times if n in ours],
            **{n: [n] for n in times if n not in ours},
        }  # fmt: skip
        for group, names in groups.items():
            if names:
                first = min(names, key=times.__getitem__)
                chosen.setdefault(group, {})[layer] = named[first]
                if group in ("production", OURS, "triton"):
                    said = f"{kind:<6} {m:>3} tokens  {layer:<8} {group:<14} {times[first]:8.2f} us  {first}"
                    run.summary.append(said)
    of_step = TINY if run.quick else STEP
    if not set(of_step) <= set(weights):
        return
    order = [(layer, i) for i in range(len(next(iter(weights.values())))) for layer in of_step]
    todo = {}
    for group, calls in chosen.items():
        if set(of_step) <= set(calls):
            todo[group] = [
                partial(calls[layer], inputs[layer][0], weights[layer][i][0], inputs[layer][1], weights[layer][i][1])
                for layer, i in order
            ]  # fmt: skip
    for group, us in measure(run, todo).items():
        case = {"scales": kind, "tokens": m, "launches": len(order)}
        run.row("step", group, case, ms=1e-3 * us, us_per_layer=us * len(of_step) / len(order))
        run.summary.append(f"{kind:<6} {m:>3} tokens  {group:<24} {1e-3 * us:8.4f} ms, a step in one graph")


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256")
    parser.add_argument("--scales", default="row,tensor,block")
    parser.add_argument("--production", default="cutlass,deepgemm,cublas,flashinfer,sgl_kernel,vllm-triton")
    parser.add_argument("--layers", default="", help=f"all, or some of {', '.join(LAYERS)}")
    parser.add_argument("--sets", default="", help=f"all, or some of {', '.join(map(label, wgmma.PARAMS))}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # passed to child processes
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_share(options, *map(int, options.compile.split("/")))
        return
    run, begin = Run("linear_fp8", "linear_fp8", options), time.monotonic()
    run.common["baseline"] = "production"
    with torch.inference_mode():
        if options.check or options.warm:
            (check_sets(run, options) if options.check else warm(run, options))
            raise SystemExit(1 if run.wrong else 0)
        warming: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        if run.cuda:
            installed = {b.name for b in production(options)} if "block" in options.scales else set()
            alone = {
                "deepgemm": list(layers_of(options)),
                "flashinfer": [options.layers],
            }  # a kernel a shape, and one
            for name, part in [(n, part) for n in alone.keys() & installed for part in alone[n]]:
                with open(run.out.with_suffix(f".{name}-{part}.log"), "w") as file:
                    command = child(options, "--warm", "--production", name, "--layers", part)
                    warming[name, part] = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            parts = max(1, (os.cpu_count() or 2) - 2)
            workers = [subprocess.Popen(child(options, "--compile", f"{i}/{parts}")) for i in range(parts)]
            finish(workers, COMPILE_S)
            print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        sets = right_sets(run, options)
        layers = TINY if run.quick else layers_of(options)
        tokens = [2, 17] if run.quick else [1, 8, 33]
        for kind in options.scales.split(","):
            for shape in layers.values() if run.quick else ODD[:2]:
                check(run, "triton", linear_fp8_triton, kind, shape, tokens, True)
        most = min(WARM_S, 0.7 * options.seconds)
        finish(warming.values(), most - (time.monotonic() - begin))  # nothing else may run during timing
        found = production(options)
        for name in sorted({name for (name, _), process in warming.items() if process.returncode != 0}):
            run.row("child", name, {}, "it did not compile in time, or failed", "unsupported")
            found = [b for b in found if b.name != name]
        print(f"checked after {time.monotonic() - begin:.0f} s: {run.wrong} wrong", flush=True)
        depth = TINY_DEPTH if run.quick else DEPTH
        bare = {layer: [values(run, n, k) for _ in range(depth)] for layer, (n, k) in layers.items()}
        for kind in options.scales.split(","):
            weights = {
                layer: [(w, weight_scales(run, KINDS[kind], *w.shape)) for w in made] for layer, made in bare.items()
            }  # fmt: skip
            for m in [int(t) for t in options.tokens.split(",")]:
                try:
                    time_point(run, kind, m, weights, found, sets)
                except Exception as error:
                    wrong = f"{type(error).__name__}: {str(error)[:300]}"
                    run.row("time", "all", {"scales": kind, "tokens": m}, wrong, "failed")
                    stop_if_lost(wrong)
    print("\n".join(["", *run.summary, f"{run.wrong} wrong"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
