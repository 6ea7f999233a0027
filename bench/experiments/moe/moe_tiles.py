"""Check tiles of fused_experts and fused_experts_fp8, then time them against vLLM's tuned kernels.

    moe_tiles.py --out rows.jsonl [--seconds 110] [--table mine.json] [--tokens 256,32,1,128,64,8,1024,4096]
        [--models mixtral-8x7b/bf16,qwen3-30b/bf16,...]

Experts of Mixtral-8x7B and Qwen3-30B-A3B in bf16 and float8 (scales per expert with static activation scales, or per
block), random weights, skewed routing. Compiles everything in parallel. For each number of tokens every suitable set
is compared with the reference on 64 tokens. Then both products are timed alone with each set, and the whole op with
the best sets, against vLLM's Triton kernel, CUTLASS and DeepGEMM: calls in CUDA graphs, interleaved, the slope between
n and 2n replays. Rows: `product` (one product with one set) and `time` (the whole op; `best` marks the choice for a
table). --table writes those as a tuned table: ours where the 95% interval of the ratio to production's fastest is
above 1, else production's by name. --device cpu --quick runs tiny shapes in Triton's interpreter; its times mean
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.graph_clock import Compiles, Run, against, finish, measure, poisoned, rounds

from fastkernels.core import registry
from fastkernels.core import tuning as tuned
from fastkernels.core.spec import Case
from fastkernels.overrides.kit.fp8 import quantize_rows
from fastkernels.overrides.moe import expert_libraries as production
from fastkernels.overrides.moe import grouped_gemm as _grouped_gemm
from fastkernels.overrides.moe.cases import MIXTRAL, QWEN3_30B
from fastkernels.overrides.moe.fused_experts_fp8 import check_scales, scales
from fastkernels.overrides.moe.grouped_gemm import grouped_gemm
from fastkernels.overrides.moe.moe_tiles import parsed, tiles, tiles_fp8, wide
from fastkernels.overrides.moe.sorted_pairs import Sorted, sort_pairs

COMPILE_S, CHECKED, TURNS = 60, 64, 4
# Largest error relative to the largest value, and RMS error: bf16 rounds three times, and float8 ties may round
# differently.
LIMITS = {"bf16": (0.02, 0.01), "fp8": (0.15, 0.04)}
SIZES = {"mixtral-8x7b": MIXTRAL, "qwen3-30b": QWEN3_30B}
TINY = {"experts": 4, "topk": 2, "hidden": 128, "intermediate": 128}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {}, "tensor": {"block": 0, "act": 0}, "channel": {"block": 1, "act": 1},
    "block": {"block": 128, "act": 128, "ue8m0": True},
}  # fmt: skip
MODELS = "mixtral-8x7b/bf16,mixtral-8x7b/tensor,qwen3-30b/bf16,qwen3-30b/block"
TOKENS = "256,32,1,128,64,8,1024,4096"  # the most important first
Call = Callable[..., torch.Tensor]


class Model(NamedTuple):
    """One of MODELS: the op, and its arguments for the largest number of tokens."""

    label: str
    sizes: dict[str, int]
    kind: str
    spec: Any
    args: list[Any]

    @property
    def weights_at(self) -> int:
        return 3 if self.kind == "bf16" else 5

    def at(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> list[Any]:
        args = [x, *self.args[1:]]
        args[self.weights_at : self.weights_at + 2] = weights, ids
        return args


def model_of(label: str, tokens: int, run: Run, device: str | None = None) -> Model:
    name, _, kind = label.partition("/")
    sizes = TINY if run.quick else SIZES[name]
    spec = registry.get("fused_experts" if kind == "bf16" else "fused_experts_fp8")
    case = Case(label, {"tokens": tokens, **sizes, **KINDS[kind]}, "float32" if run.quick else "bfloat16")
    if device == "meta":  # shapes only
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True):
            made = spec.inputs(case, "cpu", torch.Generator())
        args = [
            torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, torch.Tensor) else a for a in made
        ]  # fmt: skip
    else:
        args = spec.inputs(case, run.device, run.generator)
    return Model(label, sizes, kind, spec, args)


def routing(run: Run, tokens: int, sizes: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, ids): the hottest of 8 experts has 1.5 times the mean load, of 128 about 2.5 times."""
    bias = torch.linspace(-0.6, 0.6, sizes["experts"], device=run.device)
    logits = torch.randn(tokens, sizes["experts"], generator=run.generator, device=run.device) + bias
    weights, ids = logits.softmax(-1).topk(sizes["topk"])
    return weights / weights.sum(-1, keepdim=True), ids.int()


def own(model: Model, tokens: int, is_wide: bool) -> str:
    rows, dtype = tokens * model.sizes["topk"] // model.sizes["experts"], model.args[0].dtype
    if model.kind == "bf16":
        return str(tiles(rows, dtype, is_wide))
    return str(tiles_fp8(rows, model.kind == "block", is_wide))


def sets_for(model: Model, tokens: int, is_wide: bool) -> list[str]:
    """Return the kernel's own choice for this number of tokens, then the provider's suitable sets."""
    triton = model.spec.op.providers[0]
    args = model.at(model.args[0][:tokens], *(a[:tokens] for a in model.args[model.weights_at :][:2]))
    found = [p["gate_up"] for p in triton.params if triton.fits(p, *args)]
    return list(dict.fromkeys((own(model, tokens, is_wide), *(found if is_wide else found[:2]))))


def quantized(model: Model, a: torch.Tensor, at: int) -> tuple[torch.Tensor, _grouped_gemm.Scales]:
    """Return float8 activations before product `at`, and the position of all scales."""
    kind, w = check_scales(*model.args[1:5], *model.args[7:12]), model.args[1 + at]
    if a.is_meta:
        groups = {1: 1, 128: a.shape[1] // 128}.get(kind.activations, 0)
        q = torch.empty(a.shape, dtype=w.dtype, device="meta")
        s = torch.empty((a.shape[0], groups) if groups else (1,), device="meta")
    else:
        q, s = quantize_rows(a.float(), model.args[7 + at], kind.group_size, None, kind.min_absmax, False)
    s = s.t().contiguous().t() if s.dim() == 2 else s
    return q, scales(kind, s, w, model.args[3 + at])


def products(
    run: Run, model: Model, pairs: Sorted, x: torch.Tensor, weights: torch.Tensor, text: str
) -> list[Callable[[], Any]]:
    """Return both products with these tiles, on numbers of realistic size."""
    inner = torch.empty(pairs.n_pairs, model.args[2].shape[2], dtype=x.dtype, device=x.device)
    inner = inner if inner.is_meta else inner.normal_(generator=run.generator)
    calls = []
    for at, (a, topk, late) in enumerate(((x, pairs.topk, None), (inner, 1, weights))):
        w = model.args[1 + at]
        given, where = (a, None) if model.kind == "bf16" else quantized(model, a, at)
        out = torch.empty(pairs.n_pairs, w.shape[1], dtype=x.dtype, device=x.device)
        calls.append(partial(grouped_gemm, given, w, pairs, topk, late, parsed(text), where, out))
    return calls


def theirs(model: Model, args: list[Any]) -> dict[str, Call]:
    """Return vLLM's kernels for this call by our providers' names; print why others are missing."""
    found, several = {}, {"vllm": (production.fused_experts_vllm, production.supports_vllm)}
    if model.kind != "bf16":
        several = {
            "vllm": (production.fused_experts_fp8_vllm, production.supports_vllm_fp8),
            "cutlass": (production.fused_experts_fp8_cutlass, production.supports_cutlass),
            "deepgemm": (production.fused_experts_fp8_deepgemm, production.supports_deepgemm),
        }
    for name, (call, supports) in several.items():
        try:
            reason = supports(*args)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:100]}"
        if reason is None:
            found[name] = call
        else:
            print(f"  {model.label} {args[0].shape[0]} tokens: no {name}: {reason}", flush=True)
    return found


# -- compilation in child processes


def compile_ours(part: int, parts: int, models: list[str], tokens: list[int], run: Run) -> None:
    """Compile every `parts`-th kernel of ours."""
    _grouped_gemm.grouped_gemm_kernel = Compiles(_grouped_gemm.grouped_gemm_kernel)
    _grouped_gemm.overlap = lambda *_: {"OVERLAP": True, "launch_pdl": True}
    jobs: dict[tuple[str, str, bool], tuple[Model, int]] = {}
    for label in models:
        model = model_of(label, max(tokens), run, "meta")
        for n in tokens:
            few = 4 * n * model.sizes["topk"] <= model.sizes["experts"]
            for text in sets_for(model, n, True):
                jobs.setdefault((label, text, few), (model, n))
    for (_, text, few), (model, n) in list(jobs.items())[part::parts]:
        count, topk = n * model.sizes["topk"], model.sizes["topk"]
        some = torch.empty(16 * count, dtype=torch.int32, device="meta")
        pairs = Sorted(None if few else some, some, None if few else some, count, topk, count)
        with contextlib.suppress(Exception):  # reported where it runs
            for call in products(
                run, model, pairs, model.args[0][:n], torch.empty(n, topk, device="meta"), text
            ):
                call()


def compile_theirs(part: int, parts: int, models: list[str], tokens: list[int], run: Run) -> None:
    """Compile vLLM's kernels by real calls."""
    for label in models[part::parts]:
        model = model_of(label, max(tokens), run)
        for n in tokens:
            args = model.at(model.args[0][:n], *routing(run, n, model.sizes))
            for call in theirs(model, args).values():
                with contextlib.suppress(Exception):
                    call(*args)
        torch.cuda.synchronize()


def compiling(options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    cores, count = max(1, (os.cpu_count() or 2) - 1), len(options.models.split(","))
    shares = [f"theirs/{i}/{count}" for i in range(count)] + [f"ours/{i}/{cores}" for i in range(cores)]
    known = ("--out", os.devnull, "--tokens", options.tokens, "--models", options.models)
    return [subprocess.Popen([sys.executable, __file__, *known, "--compile", share]) for share in shares]


# -- correctness and time


def wrong_by(call: Call, args: list[Any], want: torch.Tensor, at: torch.Tensor, kind: str) -> str:
    try:
        with poisoned():
            error = call(*args)[at].float() - want
        largest = (error.abs().max() / want.abs().max()).item()
        mean = (error.square().mean() / want.square().mean()).sqrt().item()
        limit = LIMITS["bf16" if kind == "bf16" else "fp8"]
        right = largest < limit[0] and mean < limit[1]
        return "" if right else f"relative error {largest:.3g} and {mean:.3g} rms, over {limit}"
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"


def right(
    run: Run, model: Model, calls: dict[str, Call], args: list[Any], about: dict[str, Any]
) -> dict[str, Call]:
    """Return the sets that are right; a set that does not fit on the chip is no failure."""
    x, tokens = args[0], args[0].shape[0]
    at = torch.linspace(0, tokens - 1, min(tokens, CHECKED), device=run.device).long()
    few = list(args)
    few[0] = x[at].float() if model.kind == "bf16" else x[at]
    few[model.weights_at : model.weights_at + 2] = (args[model.weights_at + i][at] for i in range(2))
    want, found = model.spec.reference(*few).float(), {}
    for which, call in calls.items():
        reason = wrong_by(call, args, want, at, model.kind)
        if reason:
            status = "unsupported" if "OutOfResources" in reason else ""
            run.row("check", "tiles", {**about, "tiles": which}, reason, status)
        else:
            found[which] = call
    return found


def turns(model: Model, run: Run, tokens: int) -> list[list[Any]]:
    """Return several calls for a graph, so that L2 does not hold the weights of few experts."""
    x = model.args[0][:tokens]
    count = TURNS if tokens <= 64 else 1
    return [model.at(x, *routing(run, tokens, model.sizes)) for _ in range(count)]


def measure_point(run: Run, model: Model, tokens: int) -> tuned.Entry | None:
    is_wide = run.cuda and wide(torch.device("cuda", torch.cuda.current_device()))
    several, about = turns(model, run, tokens), {"model": model.label, "tokens": tokens}
    op, ours = model.spec.op, model.spec.op.providers[0].fn
    sets = sets_for(model, tokens, is_wide)
    calls: dict[str, Call] = {t: partial(ours, gate_up=t, down=t) for t in sets}
    found = right(run, model, {**calls, **(theirs(model, several[0]) if run.cuda else {})}, several[0], about)
    # first each product alone
    todo: dict[str, list[Callable[[], Any]]] = {}
    for text in (t for t in sets if t in found):
        both = []
        for args in several:
            weights, ids = args[model.weights_at : model.weights_at + 2]
            pairs = sort_pairs(ids, model.sizes["experts"], None, parsed(text).block_m)
            both.append(products(run, model, pairs, args[0], weights, text))
        for i, which in enumerate(("gate_up", "down")):
            todo[f"{which} {text}"] = [calls[i] for calls in both]
    alone = {name: us / len(several) for name, us in measure(run, todo).items()}
    for name, us in alone.items():
        which, text = name.split()
        run.row("product", "triton", {**about, "product": which, "tiles": text}, us=us, quiet=True)
    # then the whole op, with the best of both for each block of rows
    choices = {sets[0]: {"gate_up": sets[0], "down": sets[0]}} if sets[0] in found else {}
    for block_m in sorted({parsed(t).block_m for t in sets if t in found}):
        best = {
            which: min(
                (t for t in sets if f"{which} {t}" in alone and parsed(t).block_m == block_m),
                key=lambda t, which=which: alone[f"{which} {t}"], default=None,
            )
            for which in ("gate_up", "down")
        }  # fmt: skip
        if None not in best.values():
            choices[f"{best['gate_up']} {best['down']}"] = best
    whole = {name: partial(ours, **params) for name, params in choices.items()}
    whole |= {name: call for name, call in found.items() if name not in sets}
    samples = rounds(run, {n: [partial(call, *args) for args in several] for n, call in whole.items()})
    us = {name: statistics.median(each) / len(several) for name, each in samples.items()}
    mine = min((n for n in us if n in choices), key=us.__getitem__, default=None)
    other = min((n for n in us if n not in choices), key=us.__getitem__, default=None)
    gain, ci95 = against(samples[mine], samples[other]) if mine and other else (1.0, (1.0, 1.0))
    for name in us:
        case = {**about, "tiles": name, "now": name == sets[0], "best": name == mine}
        run.row("time", "triton" if name in choices else name, case, us=us[name], quiet=True)
    said = "  ".join(f"{n} {t:.1f}" for n, t in us.items())
    run.summary.append(f"{model.label:<19} {tokens:>4} tokens  {gain:.3f} of {other}  now {said}")
    print(run.summary[-1], flush=True)
    if mine is None or other is None:
        return None
    shape, sizes = op.key.of(*several[0])
    named = {
        k: str(v).removeprefix("torch.") if k == "dtype" else v
        for k, v in zip(op.key.shape, shape, strict=True)
    }
    at, run_id = dict(zip(op.key.sizes, sizes, strict=True)), run.common["run_id"]
    if ci95[0] > 1:
        low, high = (round(v, 4) for v in ci95)
        return tuned.Entry(
            op.name, named, at, "triton", other, run_id, choices[mine], round(gain, 4), (low, high)
        )
    return tuned.Entry(op.name, named, at, other, other, run_id)


def write_table(run: Run, path: Path, found: list[tuned.Entry]) -> None:
    """Add the entries to the file, replacing older entries of the same points."""
    from fk_bench.core.machine import commit

    about = {
        "date": datetime.now(timezone.utc).date().isoformat(), "commit": commit() or "unknown",
        "versions": run.common["versions"], "machine": run.common["machine"],
        "measured": "alone, in CUDA graphs, five interleaved rounds, 95% t-interval; "
        "bench/experiments/moe/moe_tiles.py",
    }  # fmt: skip
    table = tuned.Table(tuned.chip_of(run.device), {run.common["run_id"]: about}, tuple(found))
    path.write_text((tuned.read(path).merged(table) if path.exists() else table).to_json())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=110.0, help="start no measurement after this time")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument(
        "--models", default=MODELS, help=f"of {', '.join(SIZES)}, each with {', '.join(KINDS)}"
    )
    parser.add_argument("--table", type=Path, help="a tuned table to write the best into")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few sets")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # passed to child processes
    options = parser.parse_args()
    tokens = [5] if options.quick else [int(n) for n in options.tokens.split(",")]
    models, begin = options.models.split(","), time.monotonic()
    run = Run("moe_tiles", "fused_experts", options)
    run.common["baseline"] = "vllm"
    with torch.inference_mode():
        if options.compile:
            who, part, parts = options.compile.split("/")
            share = compile_ours if who == "ours" else compile_theirs
            return share(int(part), int(parts), models, tokens, run)
        finish(compiling(options) if run.cuda and not run.quick else [], COMPILE_S)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
        found = []
        for n in tokens:  # all models at the most important number first
            for label in models:
                if run.left() > 0:
                    model = model_of(label, n, run)
                    run.op = model.spec.name
                    found.append(measure_point(run, model, n))
                    del model
        if options.table and any(found):
            write_table(run, options.table, [e for e in found if e is not None])
    print("\n".join(["", *run.summary, f"{run.wrong} wrong, {time.monotonic() - begin:.0f} s"]), flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
