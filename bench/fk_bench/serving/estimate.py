"""A rough estimate of the duration of a serve-compare run, before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fk_bench.serving.config import CompareConfig
from fk_bench.serving.lanes import START_S, Lane

# SmolLM2-135M (270 MB of bf16), vLLM eager and SGLang, 2 cores, 2026-11-21: 20 to 31 tokens/s one by one, 5 to 6
# times that at concurrency 8. One-by-one decoding reads all weights for each token, so time grows with their size.
_CPU_TOKEN_S, _CPU_BYTES, _CPU_BATCHING = 0.040, 270e6, 5.5
_GPU_TOKEN_S, _GPU_BYTES, _GPU_BATCHING = 0.006, 16e9, 200.0
_GPU_START_S = 75.0


def estimate_s(config: CompareConfig, lanes: Sequence[Lane], weight_bytes: int, gpu: bool) -> float:
    """Seconds for the startups, the warm-ups, all rounds and the agreement phase of these lanes."""
    token_s, size, batching = (
        (_GPU_TOKEN_S, _GPU_BYTES, _GPU_BATCHING) if gpu else (_CPU_TOKEN_S, _CPU_BYTES, _CPU_BATCHING)
    )
    token_s *= max(0.1, (weight_bytes or size) / size)
    total = 0.0
    for lane in lanes:
        if lane.url is None:
            total += _GPU_START_S if gpu else START_S[lane.host] + 4
        for level in config.levels:
            if level.search:  # doublings and halvings of about ten seconds
                total += config.rounds * 20 * math.log2(level.value / (level.start or 1.0))
                continue
            requests = (level.warmup + config.rounds * config.prompts_at(level)) * config.turns_of(level)
            input_len, output_len = config.lengths(level)
            # a prompt token costs about a twentieth of a generated one
            busy = requests * (output_len + input_len / 20) * token_s
            if level.kind == "rate":
                total += max(requests / level.value, busy / batching)
            else:
                total += busy / (min(batching, level.value) if level.kind == "concurrency" else batching)
        total += 2 * config.agreement_prompts * config.agreement_len * token_s
    return total
