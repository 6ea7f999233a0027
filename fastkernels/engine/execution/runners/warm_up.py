"""Runs steps of many sizes before the first request, so that no request waits for a kernel to compile or load.

Loading a kernel takes milliseconds at its first call, compiling takes seconds. Which kernels run depends on the step's
tokens, rows, context lengths and sampling parameters.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fastkernels.engine.execution.forward.memory_profile import every_way, made_up_step
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.options.speculation import Speculation
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.steps.step import StepInput, even

log = logging.getLogger("fastkernels")
# Both sides of each change of kernel: multiples of 16 (Triton), tiles of 64 to 256 rows (cuBLAS), tuned tables.
DECODES = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256)  # rows
PROMPTS = (2, 3, 17, 32, 65, 129, 300, 512, 520, 777, 1040, 1531, 2048, 3001, 4096)  # tokens
LONG = 2100  # context tokens in half of the steps: enough for attention to split the keys, and for sparse attention
TOKENS_OF_A_ROW, FEW = 200, 64
LOGPROBS = 20  # per row at most, even if the engine allows more


def warm_up_steps(
    max_num_seqs: int, max_tokens: int, max_model_len: int, logprobs: int
) -> Iterator[StepInput]:
    """Decode steps with greedy, random and full-featured sampling; then steps with prompts, every second one with
    decodes. Context lengths alternate between short and long; no row has more than max_model_len tokens.
    """
    ways = (SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=0), every_way(logprobs))
    for rows in sorted({n for n in DECODES if n < max_num_seqs} | {max_num_seqs}):
        one = np.ones(rows, dtype=np.int32)
        many = FEW < rows < max_num_seqs  # penalties are set up row by row, which is slow
        for context, params in zip((0, LONG, LONG), ways[: 2 if many else 3], strict=False):
            yield made_up_step(one, np.minimum(one + context, max_model_len), params)
    for i, tokens in enumerate(sorted({n for n in PROMPTS if n < max_tokens} | {max_tokens})):
        rows = min(max_num_seqs, max(tokens // TOKENS_OF_A_ROW, -(-tokens // max_model_len)))
        decodes = max(0, min(rows, max_num_seqs - rows, tokens - 2 * rows)) if i % 2 else 0
        lens = even(rows, tokens - decodes, max_model_len)
        lens = np.sort(np.concatenate([np.ones(decodes, dtype=np.int32), lens]))
        context = LONG if i % 4 > 1 else 0
        yield made_up_step(lens, np.minimum(lens + context, max_model_len), ways[i % 3])


def draft_steps(max_num_seqs: int, max_tokens: int, max_model_len: int, count: int) -> Iterator[StepInput]:
    """Steps whose rows have one token and so many drafts."""
    for rows in sorted({n for n in DECODES if n < max_num_seqs} | {max_num_seqs}):
        lens = np.full(rows, count + 1, dtype=np.int32)
        if rows * (count + 1) <= max_tokens and count < max_model_len:
            params = SamplingParams(temperature=1.0, seed=0)
            made = made_up_step(lens, np.minimum(lens + LONG, max_model_len), params)
            yield replace(made, drafts=lens - 1)


def warm_up(runner: Runner) -> None:
    """Run the steps, and what a model does at a border.

    They write to block 0 and to unused slots, so no request may be running.
    """
    config, replays = runner.config, dict(runner.graphs.replays) if runner.graphs is not None else None
    logprobs = config.max_logprobs if 0 <= config.max_logprobs <= LOGPROBS else LOGPROBS
    sizes = config.max_num_seqs, config.max_num_batched_tokens, runner.limits.max_model_len
    steps = warm_up_steps(*sizes, logprobs)
    if config.speculative_config is not None:
        count = Speculation.read(config.speculative_config).num_speculative_tokens
        steps = itertools.chain(steps, draft_steps(*sizes, count))
    for step in steps:
        try:
            runner.launch(step).result()
        except torch.OutOfMemoryError as error:
            if config.num_ranks > 1:
                raise  # the ranks are out of step
            log.warning(
                "a step of %d tokens in %d rows does not fit into memory, and requests may need one: reduce num_blocks,"
                " kv_cache_memory or max_num_batched_tokens (%s)",
                len(step.input_ids), len(step.slots), error,
            )  # fmt: skip
            break
    runner.run_border()
    if runner.graphs is not None and replays is not None:
        runner.graphs.replays = replays  # it counts steps of requests only
