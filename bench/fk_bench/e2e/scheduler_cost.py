"""The CPU cost of a decode step without the model: scheduling, the step's input, and processing of its tokens."""

from __future__ import annotations

import statistics
import time

import numpy as np

STEPS = 200


class NoModel:
    """An executor whose steps take no time and always return the same token."""

    def launch(self, step):  # type: ignore[no-untyped-def]
        from fastkernels.engine.steps.step import StepOutput

        self.output = StepOutput(np.full(len(step.slots), 5))
        return self

    def result(self):  # type: ignore[no-untyped-def]
        return self.output


def measure(requests: int, context: int) -> dict[str, float]:
    """Microseconds of a step with `requests` running requests that have `context` tokens each."""
    from fastkernels.engine.cache.blocks import BlockManager
    from fastkernels.engine.sampling.sampling_params import SamplingParams
    from fastkernels.engine.scheduling.engine_core import EngineCore
    from fastkernels.engine.scheduling.request import Request
    from fastkernels.engine.scheduling.scheduler import Scheduler

    blocks = BlockManager(requests * ((context + 2 * STEPS) // 16 + 2), 16)
    core = EngineCore(Scheduler([blocks], requests, max(1 << 16, requests), requests), NoModel(), depth=2)
    params = SamplingParams(max_tokens=2 * STEPS)
    tokens = np.random.default_rng(0).integers(0, 1000, (requests, context)).tolist()
    for i, prompt in enumerate(tokens):
        core.scheduler.add(Request(str(i), prompt, params, 2 * STEPS))
    while core.scheduler.num_waiting or any(r.num_computed_tokens < context for r in core.scheduler.running):
        core.step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        core.step()
        times.append(1e6 * (time.perf_counter() - start))
    cuts = statistics.quantiles(times, n=20)
    return {"us_per_step": statistics.median(times), "us_per_step_p95": cuts[18]}
