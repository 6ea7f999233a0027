"""A decode step of our engine, from one to the next, as it is and with its head and sampler launched after the graph.

    python bench/scenarios/engine_step.py --out rows.jsonl [--batch 1,8,32] [--context 512] [--model-len 131072]

Llama-3.1-8B's shapes, random weights, hand-made steps of which two are under way, half of the rows greedy. First the
tokens: those of the first step must be the same with both graphs; `same` says how many of all steps' are, eager ones'
too (after one near-tie that turns, a sequence is another). Then rounds are interleaved: us of a step by the wall clock,
and of its launch on the CPU. --device cpu --quick runs a tiny model without graphs: its times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_step import llama_folder
from graph_clock import ROUNDS, Run

from fastkernels import LLM, SamplingParams
from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.engine.execution.generate import Generate
from fastkernels.engine.execution.graphs import Graphs, Outputs
from fastkernels.engine.execution.step import SAMPLED, NewRow, StepInput

STEPS, WARM = 120, 20


def make_llm(options: argparse.Namespace) -> LLM:
    folder = llama_folder(options.quick, options.model_len)
    return LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, device=options.device, block_size=16,
        max_num_seqs=64, max_model_len=options.model_len,
    )  # fmt: skip


def make_steps(rows: int, context: int) -> list[StepInput]:
    """Decodes of `rows` requests that enter in the first, from `context` tokens on, each in blocks of its own."""
    width = -(-(context + STEPS) // 16)
    slots = np.arange(rows, dtype=np.int64)
    columns = np.tile(np.arange(width), rows)
    updates = np.column_stack([np.repeat(slots, width), columns, 1 + np.arange(rows * width)]).astype(
        np.int32
    )
    params = [SamplingParams(temperature=0 if i % 2 == 0 else 0.8, seed=i, top_p=0.95) for i in range(rows)]
    new = [NewRow(i, p, i) for i, p in enumerate(params)]
    one, lasting = np.ones(rows, dtype=np.int32), np.full(rows, SAMPLED, dtype=np.int64)
    return [
        StepInput(
            slots, one, one * (context + i), np.full(rows, i, dtype=np.int64), slots + 5 if i == 0 else lasting, rows,
            updates if i == 0 else updates[:0], new if i == 0 else (),
        )
        for i in range(STEPS)
    ]  # fmt: skip


def play(runner: Generate, steps: list[StepInput]) -> tuple[np.ndarray, float, float]:
    """(tokens [STEPS, rows], us of a step, us of a launch), without the first steps' times."""
    tokens, launches, begin, pending = [], [], 0.0, None
    for i, step in enumerate(steps):
        if i == WARM:
            begin = time.perf_counter()
        started = time.perf_counter()
        following = runner.launch(step)
        launches.append(time.perf_counter() - started)
        if pending is not None:
            tokens.append(pending.result().token_ids)
        pending = following
    assert pending is not None
    tokens.append(pending.result().token_ids)
    us = 1e6 * (time.perf_counter() - begin) / (len(steps) - WARM)
    return np.stack(tokens), us, 1e6 * statistics.median(launches[WARM:])


def hidden_only(runner: Generate) -> Callable[[Any, AttentionMetadata], Outputs]:
    """What a graph held when it ended with hidden states."""

    def captured(inputs: Any, metadata: AttentionMetadata) -> Outputs:
        torch.index_select(runner.batch.block_table, 0, inputs.slots, out=metadata.block_table)
        return Outputs(runner._forward(runner.batch.known_ids(inputs), inputs, metadata))

    return captured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--model-len", type=int, default=131072)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args()
    run = Run("engine_step", "engine", options)
    runner = make_llm(options).llm_engine.runner
    ways: dict[str, Graphs | None] = {"tokens in the graph": runner.graphs, "eager": None}
    if runner.graphs is not None:
        with torch.inference_mode():
            ways["hidden states in the graph"] = Graphs(
                hidden_only(runner), runner.backend, runner.batch, runner.device, runner.config.max_num_seqs,
                runner.limits.max_model_len, runner.config.max_num_batched_tokens,
            )  # fmt: skip
    for batch in (int(b) for b in options.batch.split(",")):
        case = {"batch": batch, "context": options.context}
        steps, times = make_steps(batch, options.context), dict[str, list[tuple[float, float]]]()
        want: np.ndarray | None = None
        for name, graphs in ways.items():
            runner.graphs = graphs
            found = play(runner, steps)[0]
            want = found if want is None else want
            right = name == "eager" or (found[0] == want[0]).all()
            wrong = "" if right else f"tokens {found[0]}, not {want[0]}"
            run.row("check", name, case, wrong, same=float((found == want).mean()))
        for _ in range(ROUNDS if run.cuda else 1):
            for name, graphs in ways.items():
                runner.graphs = graphs
                times.setdefault(name, []).append(play(runner, steps)[1:])
        for name, found_times in times.items():
            step_us, launch_us = (statistics.median(t) for t in zip(*found_times, strict=True))
            run.row("time", name, case, step_us=step_us, launch_us=launch_us)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
