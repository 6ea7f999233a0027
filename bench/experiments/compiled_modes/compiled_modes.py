"""Time timm's encoders, stock and patched, in each mode: eager, compiled without graphs, and compiled in CUDA graphs.

    python bench/experiments/compiled_modes/compiled_modes.py FOLDER --models vit,pe

Both lanes are in one process and take turns. Graphs are those of torch.compile(mode="reduce-overhead"). Rows go to
FOLDER/compiled_modes.jsonl; the exit status is 1 if a patched model is slower than the stock one in any mode, or if its
result differs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import fastkernels
from fastkernels.core import registry
from fastkernels.verify import host_time
from fastkernels.verify.measure import Ratio

MODELS = {
    "vit": "vit_base_patch16_224", "pe": "vit_pe_core_base_patch16_224", "dinov3": "vit_base_patch16_dinov3",
    "swinv2": "swinv2_base_window8_256", "eva02": "eva02_base_patch14_224", "deit3": "deit3_base_patch16_224",
}  # fmt: skip
# By default DINOv3 makes its positions anew in each call, and each block of SwinV2 differs by a drop path.
OPTIONS: dict[str, dict[str, Any]] = {
    "dinov3": {"dynamic_img_size": False}, "swinv2": {"drop_path_rate": 0.0},
}  # fmt: skip
MODES = ("eager", "compiled", "graphs")
ROUNDS, SECONDS = 9, 0.05  # of a measurement, and of a round
EAGER_ROUNDS = 41  # the CPU, which other programs use as well, is the limit of eager calls
SLOWER = 0.99  # a whole interval below this is a loss


def build(name: str, device: str, tiny: bool) -> tuple[Any, int]:
    """(model in bfloat16, its image size)."""
    import timm

    torch.manual_seed(0)
    small = {"depths": (1, 1, 1, 1)} if "swin" in name else {"depth": 2}
    options = {**OPTIONS.get(name, {}), **(small if tiny else {})}
    with torch.device(device):  # buffers that a model makes on the CPU are copied in each call
        model = timm.create_model(MODELS[name], **options)
    model = model.eval().to(device, torch.bfloat16)
    return model, model.pretrained_cfg["input_size"][-1]


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounds(lanes: list[Callable[[], Any]], number: int) -> list[list[float]]:
    """Seconds of a call, by lane and round; lanes take turns."""
    for lane in lanes:
        lane(), lane()
    wait()
    began = time.perf_counter()
    lanes[0]()
    wait()
    count = max(1, int(SECONDS / max(time.perf_counter() - began, 1e-6)))
    times: list[list[float]] = [[] for _ in lanes]
    for i in range(number):
        for j in range(len(lanes)):
            which = (i + j) % len(lanes)
            began = time.perf_counter()
            for _ in range(count):
                lanes[which]()
            wait()
            times[which].append((time.perf_counter() - began) / count)
    return times


def measure(
    name: str, batches: list[int], modes: list[str], device: str, tiny: bool, ops: list[str] | None
) -> list[dict[str, Any]]:
    """Rows of one model."""
    stock, size = build(name, device, tiny)
    patched, twin = copy.deepcopy(stock), copy.deepcopy(stock)
    report = fastkernels.patch(patched, ops=ops)
    both = (stock, patched)
    subjects: dict[str, list[Any]] = {
        "eager": [*both, twin],
        "compiled": [torch.compile(model, dynamic=False) for model in both],
        "graphs": [torch.compile(model, dynamic=False, mode="reduce-overhead") for model in both],
    }
    made = []
    with torch.inference_mode():
        for (
            mode
        ) in modes:  # eager calls first: once a model is compiled, its modules no longer sleep in these
            for batch in batches:
                x = torch.randn(batch, 3, size, size, device=device, dtype=torch.bfloat16)
                lanes = [partial(model, x) for model in subjects[mode]]
                began = time.perf_counter()
                outs = [lane().float() for lane in lanes]
                first = time.perf_counter() - began
                near = float(
                    torch.nn.functional.cosine_similarity(outs[0].flatten(), outs[1].flatten(), dim=0)
                )
                times = rounds(lanes, EAGER_ROUNDS if mode == "eager" else ROUNDS)
                ratio = Ratio.of(times[1], times[0])
                twins = [Ratio.of(t, times[0]) for t in times[2:]]
                row = {
                    "model": name, "batch": batch, "mode": mode, "stock_ms": 1e3 * median(times[0]),
                    "patched_ms": 1e3 * median(times[1]), "speedup": ratio.value, "ci95": [ratio.low, ratio.high],
                    "cosine": near, "first_call_s": first, "stock_twice": [[t.low, t.high] for t in twins],
                }  # fmt: skip
                made.append(row)
                print(
                    f"{name:8} {batch:3} {mode:9} {row['stock_ms']:8.3f} {row['patched_ms']:8.3f} "
                    f"{ratio.value:6.3f} ({ratio.low:.3f} to {ratio.high:.3f})  cosine {near:.4f}  first {first:.0f} s"
                    + "".join(f"  stock twice {t.value:.3f} ({t.low:.3f} to {t.high:.3f})" for t in twins),
                    flush=True,
                )
    print(report.refresh() or report, flush=True)
    return made


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def calls(device: str) -> list[dict[str, Any]]:
    """Rows with the CPU time of a call of linear_gelu, and of the same in PyTorch, for its model cases."""
    made, spec = [], registry.get("linear_gelu")
    generator = torch.Generator(device).manual_seed(0)
    for case in (c for c in spec.cases if "model" in c.tags):
        args = spec.inputs(case, device, generator)
        both = partial(spec.op, *args), partial(plain, *args)
        with torch.inference_mode():
            both[0](), both[1]()
            wait()
            ours, usual = map(host_time.least, both)
        made.append({"call": spec.name, "case": case.name, "ours_us": 1e6 * ours, "torch_us": 1e6 * usual})
        print(
            f"CPU time of a call, {case.name}: ours {1e6 * ours:.1f} us, PyTorch {1e6 * usual:.1f} us",
            flush=True,
        )
    return made


def compile_ahead(names: list[str], batches: list[int], modes: list[str], argv: list[str]) -> None:
    """Compile all lanes at the same time, so that the measurement finds them in Inductor's cache."""
    command = [sys.executable, __file__, *argv, "--only-compile"]
    jobs = itertools.product(names, batches, [mode for mode in modes if mode != "eager"])
    running = [
        subprocess.Popen(
            [*command, "--models", name, "--batches", str(batch), "--modes", mode], stdout=subprocess.DEVNULL
        )
        for name, batch, mode in jobs
    ]
    for process in running:
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--modes", help=f"default: {','.join(MODES)}; on a CPU without graphs")
    parser.add_argument("--ops", help="only these ops, requested by name; default: a patch as users make it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two layers, for a CPU")
    parser.add_argument("--only-compile", action="store_true")
    args = parser.parse_args()
    names, batches = args.models.split(","), [int(b) for b in args.batches.split(",")]
    default = [mode for mode in MODES if args.device != "cpu" or mode != "graphs"]
    modes = args.modes.split(",") if args.modes else default
    if wrong := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes {','.join(wrong)}: known are {', '.join(MODES)}")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"--models {','.join(unknown)}: known are {', '.join(MODELS)}")
    ops = args.ops.split(",") if args.ops else None
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.only_compile or args.tiny:
        globals().update(ROUNDS=3, EAGER_ROUNDS=3, SECONDS=0.0)
    elif args.device == "cuda":
        cache = tempfile.TemporaryDirectory(prefix="inductor")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
        more = ["--ops", args.ops] if args.ops else []
        began = time.perf_counter()
        compile_ahead(names, batches, modes, [str(args.folder), *more])
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    torch._dynamo.config.recompile_limit = 64
    rows = [] if args.only_compile or args.tiny else calls(args.device)
    print("model  batch mode      stock ms  patched speedup", flush=True)
    for name in names:
        rows += measure(name, batches, modes, args.device, args.tiny, ops)
    if not args.only_compile:
        with (args.folder / "compiled_modes.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    lost = [row for row in rows if "speedup" in row and (row["ci95"][1] < SLOWER or row["cosine"] < 0.99)]
    for row in lost:
        print(
            f"LOSS: {row['model']} batch {row['batch']} {row['mode']}: {row['speedup']:.3f}, cosine {row['cosine']:.4f}"
        )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
