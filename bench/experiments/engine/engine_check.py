"""Check our engine on a GPU: correct in every mode, never waiting, and how long it idles between steps.

    engine_check.py MODEL --out rows.jsonl [--modes graphs,mixed,...] [--no-compare]

1. Compares the greedy tokens of each mode with transformers, which reads each generated sequence at once. The gap of a
   token is (largest logit - the token's logit): a few hundredths are bf16 noise, a wrong kernel or graph gives whole
   logits. An fp8 cache is less exact: its modes are compared with the gaps of plain PyTorch on the same kind of cache
   (mode fp8_reference, which must run first).
2. Runs a steady decode with two steps in flight under CUDA's synchronization check: time of a step, of its launch on
   the CPU, and of the GPU's idle gap between two steps, by rows and context.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fk_bench.core import machine as machine_module
from fk_bench.core.rows import Row, Status, Subject, append

from fastkernels import LLM, SamplingParams, __version__
from fastkernels.engine.execution.step import SAMPLED, NewRow, StepInput

BATCHES, INPUT, OUTPUT, LIMIT, FP8_LIMIT = (1, 3, 8, 32), 100, 64, 0.5, 4.0
STEADY = ((1, 256), (1, 3500), (64, 256), (64, 2048), (256, 256), (256, 1024))  # (rows, context)
STEPS, WARM = 60, 8
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "mixed": {"max_num_seqs": 32, "max_num_batched_tokens": 64},
    "triton": {"attention_backend": "triton"},
    "flashinfer": {"attention_backend": "flashinfer"},
    "fa3": {"attention_backend": "fa3"},
    "reference": {"attention_backend": "reference", "enforce_eager": True},
    "fp8_reference": {"kv_cache_dtype": "fp8", "attention_backend": "reference", "enforce_eager": True},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8_flashinfer": {"kv_cache_dtype": "fp8", "attention_backend": "flashinfer"},
}


def gaps(reference: Any, sequences: list[list[int]]) -> list[float]:
    found: list[float] = []
    with torch.inference_mode():
        for sequence in sequences:
            ids = torch.tensor([sequence], device="cuda")
            logits = reference(ids).logits[0, INPUT - 1 : -1].float()
            chosen = logits.gather(1, ids[0, INPUT:, None])[:, 0]
            found += (logits.max(dim=1).values - chosen).tolist()
    return found


def generate(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Return sequences with their prompts, and output tokens a second of a second run."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    llm.generate(prompts, params)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    speed = len(prompts) * OUTPUT / (time.perf_counter() - start)
    return [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)], speed


def steady_steps(rows: int, context: int, block_size: int) -> list[StepInput]:
    """Return decode steps of `rows` sequences from `context` keys on, each in its own blocks."""
    width = -(-(context + STEPS) // block_size)
    slots = np.arange(rows, dtype=np.int64)
    blocks = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    columns = np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))
    updates = np.stack([np.broadcast_to(slots[:, None], (rows, width)), columns, blocks], axis=-1)
    updates = updates.reshape(-1, 3).astype(np.int32)
    new = [NewRow(int(slot), SamplingParams(temperature=0), 0) for slot in slots]
    ones, none = np.ones(rows, dtype=np.int32), np.empty((0, 3), dtype=np.int32)
    return [
        StepInput(
            slots, ones, np.full(rows, context + i, dtype=np.int32), np.full(rows, i, dtype=np.int64),
            np.full(rows, SAMPLED if i else 5, dtype=np.int64), rows, none if i else updates, () if i else new,
        )
        for i in range(STEPS)
    ]  # fmt: skip


def steady(runner: Any, rows: int, context: int) -> dict[str, float]:
    """Return metrics of a decode with two steps in flight. Overwrites the cache: the engine is unusable afterwards."""
    steps = steady_steps(rows, context, runner.config.block_size)
    for step in steps[:WARM]:
        runner.launch(step).result()
    marks, launches, syncs = [], [], 0
    pending = None
    begin = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps[WARM:]:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            started = time.perf_counter()
            pair[0].record()
            following = runner.launch(step)
            pair[1].record()
            launches.append(time.perf_counter() - started)
            marks.append(pair)
            if pending is not None:
                pending.result()
            pending = following
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        print("synchronizes:", error, flush=True)
        syncs = 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    if syncs:
        return {"synchronizations": 1.0}
    wall = (time.perf_counter() - begin) / len(marks)
    idle = [before[1].elapsed_time(after[0]) for before, after in pairwise(marks)]
    busy = [start.elapsed_time(end) for start, end in marks]
    return {
        "synchronizations": 0.0, "step_us": wall * 1e6, "gpu_step_us": statistics.median(busy) * 1e3,
        "gpu_idle_us": statistics.median(idle) * 1e3, "launch_us": statistics.median(launches) * 1e6,
    }  # fmt: skip


class Rows:
    """Prints results and appends them to the file."""

    def __init__(self, out: Path):
        self.out, self.bad = out, 0
        self.fp8_limit = FP8_LIMIT  # 1.5 times the largest gap of fp8_reference, once that has run

    def add(self, case: dict[str, Any], metrics: dict[str, float], status: Status, reason: str = "") -> None:
        self.bad += status in (Status.WRONG, Status.FAILED)
        row = Row(
            run_id="engine_check", command="engine_check", machine=machine_module.machine(),
            commit=machine_module.commit(), versions={"fastkernels": __version__, "torch": torch.__version__},
            status=status, reason=reason, subject=Subject(host="fastkernels"), case=case, metrics=metrics,
        )  # fmt: skip
        append(self.out, [row])
        print(status.value, case, {k: round(v, 4) for k, v in metrics.items()}, reason, flush=True)


def check_mode(
    model: str, mode: str, reference: Any, prompts: dict[int, list[list[int]]], rows: Rows
) -> None:
    start = time.perf_counter()
    try:
        llm = LLM(model, max_model_len=4096, gpu_memory_utilization=0.6, **MODES[mode])
    except ValueError as error:  # a missing backend
        rows.add({"kind": mode}, {}, Status.SKIPPED, str(error))
        return
    built = {
        "build_s": time.perf_counter() - start,
        "kv_tokens": float(llm.llm_engine.runner.limits.num_blocks * 16),
    }
    rows.add({"kind": f"{mode}_build"}, built, Status.OK)
    runner = llm.llm_engine.runner
    limit = rows.fp8_limit if "fp8" in mode else LIMIT
    largest = 0.0
    for n in BATCHES:
        before = dict(runner.graphs.replays) if runner.graphs is not None else {}
        sequences, speed = generate(llm, prompts[n])
        replays = {k: v - before[k] for k, v in runner.graphs.replays.items()} if before else {}
        metrics = {f"{k}_replays": float(v) for k, v in replays.items()} | {"output_tokens_per_s": speed}
        status = Status.OK
        if reference is not None:
            found = gaps(reference, sequences[:8])
            metrics |= {"gap_max": max(found), "gap_mean": sum(found) / len(found)}
            largest = max(largest, *found)
            status = Status.WRONG if metrics["gap_max"] > limit else Status.OK
        case = {"kind": mode, "requests": n, "input_len": INPUT, "output_len": OUTPUT}
        rows.add(case, metrics, status)
    if mode == "fp8_reference" and largest:
        rows.fp8_limit = 1.5 * largest
    for count, context in STEADY:
        blocks = count * -(-(context + STEPS) // runner.config.block_size) + 1
        if count > runner.config.max_num_seqs or blocks > runner.limits.num_blocks or "reference" in mode:
            continue
        metrics = steady(runner, count, context)
        status = Status.FAILED if metrics["synchronizations"] else Status.OK
        rows.add({"kind": f"{mode}_steady", "rows": count, "context": context}, metrics, status)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument(
        "--no-compare",
        action="store_true",
        help="measure speed and synchronization only, without transformers",
    )
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = {n: [[rng.randrange(1000, 49000) for _ in range(INPUT)] for _ in range(n)] for n in BATCHES}
    reference, rows = None, Rows(args.out)
    if not args.no_compare:
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda().eval()
    for mode in args.modes.split(","):
        try:
            check_mode(args.model, mode, reference, prompts, rows)
        except Exception as error:
            traceback.print_exc()
            rows.add({"kind": mode}, {}, Status.FAILED, f"{type(error).__name__}: {error}"[:2000])
        gc.collect()
        torch.cuda.empty_cache()
    raise SystemExit(1 if rows.bad else 0)


if __name__ == "__main__":
    main()
