"""A rough estimate of the duration of a serve-compare run, before it starts."""

from __future__ import annotations

import math

from fk_bench.serving.config import CompareConfig, Level
from fk_bench.serving.lanes import START_S, Lane

# SmolLM2-135M (270 MB of bf16), vLLM eager and SGLang, 2 cores, 2026-11-21: 20 to 31 tokens/s one by one, 5 to 6
# times that at concurrency 8. One-by-one decoding reads all weights for each token, so time grows with their size.
_CPU_TOKEN_S, _CPU_BYTES, _CPU_BATCHING = 0.040, 270e6, 5.5
_GPU_TOKEN_S, _GPU_BYTES, _GPU_BATCHING = 0.006, 16e9, 200.0
_GPU_START_S = 75.0
START, AGREEMENT = "start", "agreement"  # kinds of steps; the others are the labels of loads


class Estimate:
    """Seconds of each step of a run."""

    def __init__(self, config: CompareConfig, weight_bytes: int, gpu: bool):
        token_s, size, self.batching = (
            (_GPU_TOKEN_S, _GPU_BYTES, _GPU_BATCHING) if gpu else (_CPU_TOKEN_S, _CPU_BYTES, _CPU_BATCHING)
        )
        self.config, self.gpu = config, gpu
        self.token_s = token_s * max(0.1, (weight_bytes or size) / size)

    def start(self, lane: Lane) -> float:
        if lane.url is not None:
            return 0.0
        return _GPU_START_S if self.gpu else START_S[lane.host] + 4

    def rounds(self, level: Level, rounds: int) -> float:
        """That many rounds of a load, and its warm-up."""
        if level.search:  # doublings and halvings of about ten seconds
            return rounds * 20 * math.log2(level.value / (level.start or 1.0))
        config = self.config
        requests = (level.warmup + rounds * config.prompts_at(level)) * config.turns_of(level)
        input_len, output_len = config.lengths(level)
        # a prompt token costs about a twentieth of a generated one
        busy = requests * (output_len + input_len / 20) * self.token_s
        if level.kind == "rate":
            return max(requests / level.value, busy / self.batching)
        return busy / (min(self.batching, level.value) if level.kind == "concurrency" else self.batching)

    def agreement(self) -> float:
        return 2 * self.config.agreement_prompts * self.config.agreement_len * self.token_s
