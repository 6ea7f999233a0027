"""Measures, at start, the time of a step with drafts and of one without, for some numbers of sequences."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from fastkernels.engine.execution.forward.memory_profile import made_up_step
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.options.speculation import Speculation
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.steps.step import SAMPLED, NextDrafts, StepInput

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512  # tokens of a sequence
ROUNDS = 5  # of both steps, after one that is not measured
SLOW = 0.5  # seconds of all rounds after which two are enough
CHAIN = 4  # steps of a measurement with two in flight
SECONDS = 3.0  # after which no larger size is begun


def measure(executor: Any, config: EngineConfig, settings: Speculation, depth: int = 1) -> dict[int, float]:
    """{sequences: time with drafts over time without}. The steps write to block 0: no request may be running.

    depth: of steps in flight. Empty if no step has room for a sequence with all its drafts.
    """
    count, limits = settings.num_speculative_tokens, executor.limits
    found, begin = dict[int, float](), time.perf_counter()
    for rows in sorted({min(size, config.max_num_seqs) for size in SIZES}):
        late = time.perf_counter() - begin > SECONDS
        if late or rows * (count + 1) > limits.max_num_batched_tokens or limits.max_model_len < count + 2:
            break
        plain, drafted = steps(rows, count, limits.max_model_len, settings.has_model, settings.holds_drafts)
        times: list[list[float]] = [[], []]
        for step in (plain, drafted):
            _run(executor, step, depth)  # kernels may compile
        while len(times[0]) < 2 or (len(times[0]) < ROUNDS and sum(map(sum, times)) < SLOW):
            for spent, step in zip(times, (plain, drafted), strict=True):
                spent.append(_run(executor, replace(step, new_rows=()), depth))
        without, with_drafts = map(min, times)  # other work only adds time
        found[rows] = with_drafts / without
    return found


def steps(
    rows: int, count: int, longest: int, has_model: bool, held: bool = False
) -> tuple[StepInput, StepInput]:
    """(a step of so many sequences, the same with drafts). held: drafts stay on the device"""
    one, params = np.ones(rows, np.int32), SamplingParams(temperature=0)
    keys = min(CONTEXT, longest - count)
    plain = made_up_step(one, one * keys, params)
    drafted = made_up_step(one * (count + 1), one * (keys + count), params)
    drafted = replace(drafted, drafts=one * count)
    if has_model:
        # Without drafts, the draft model still stores its keys.
        last = np.full(rows, SAMPLED, np.int64)
        plain = replace(plain, next_drafts=NextDrafts(0, last, one * longest))
        drafted = replace(drafted, next_drafts=NextDrafts(count, last, one * longest, shown=not held))
    return plain, drafted


def _run(executor: Any, step: StepInput, depth: int) -> float:
    """Seconds of a step, of several one behind the other if so many are in flight."""
    begin, count = time.perf_counter(), 1 if depth == 1 else CHAIN
    pending = deque[Any]()
    for i in range(count):
        pending.append(executor.launch(step if i == 0 else replace(step, new_rows=())))
        while len(pending) >= depth or (pending and i == count - 1):
            output = pending.popleft().result()
            if output.next_drafts is not None:
                output.next_drafts()
    return (time.perf_counter() - begin) / count
