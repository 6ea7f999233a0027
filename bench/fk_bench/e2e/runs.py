"""One run of a load: the prompts that a host gets, and the metrics of the seconds at which its tokens came."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fk_bench.e2e.loads import Kind, Load, held_tokens
from fk_bench.e2e.ratios import FIRST_SECONDS, INPUT, OUTPUT
from fk_bench.offline.host import prompts_of

FIRST_TOKENS = 16  # of the first run of a load, which is not compared
# Tokens of a prompt that hosts compute again although their cache holds it: the last block, and what rounding adds.
AGAIN = 272
INCOMPLETE = "not all tokens were generated"


class Prompts:
    """The prompts of runs. Tokens that the prefix cache holds are the same in every run and load."""

    def __init__(self, seed: str, loads: Sequence[Load], vocab: int):
        self.vocab = vocab
        self.held = [
            prompts_of(f"{seed} held {i}", 1, length, vocab)[0] for i, length in enumerate(held_tokens(loads))
        ]

    def work(self, load: Load, seed: str) -> dict[str, Any]:
        """The line of input of offline.py for a run; new tokens are drawn from `seed`."""
        work = {"prompts": self.of(load, seed), "output_len": load.output_len, "arrivals": True}
        if load.arriving:
            arriving = prompts_of(f"{seed} arriving", load.arriving, load.arriving_input, self.vocab)
            after = [(i + 1) * load.gap for i in range(load.arriving)]
            work["later"] = {"prompts": arriving, "output_len": load.arriving_output, "after": after}
        return work

    def of(self, load: Load, seed: str) -> list[list[int]]:
        """The prompts of the requests that start together."""
        new = prompts_of(seed, load.requests, load.input_len - load.held, self.vocab)
        return [self.held[i][: load.held] + rest for i, rest in enumerate(new)] if load.held else new


def first_run(load: Load) -> Load:
    """The first run of a load in a state: a few tokens are enough, except where prompts arrive during the decodes."""
    return load if load.arriving else replace(load, output_len=min(FIRST_TOKENS, load.output_len))


def too_little_cached(load: Load, number: int, metrics: Mapping[str, float]) -> str:
    """Why a run is no run of its load: the prefix cache held too little. The first run fills it."""
    found = metrics.get("cached_tokens_per_prompt")
    if number < 0 or not load.held or found is None or found + AGAIN >= load.held:
        return ""
    return (
        f"the prefix cache held {found:.0f} tokens of a prompt, not {load.held}: more memory (--gpu-share), fewer or"
        " shorter loads, or a model whose cache the host does not share"
    )


def metrics_of(
    arrivals: Sequence[Sequence[float]], load: Load, sent: Sequence[float] = (),
    cached: Sequence[int | None] = (),
) -> tuple[dict[str, float], str]:  # fmt: skip
    """The metrics of a run, and what is wrong with it. arrivals: seconds to each token of each request.

    A step is the time between two tokens of a request while every request decodes. With prompts that arrive later,
    TTFT is theirs, from the time when they were sent; steps and TPOT are those of the decodes around them.

    sent    seconds at which each request was sent (default: 0)
    cached  tokens of each prompt that the prefix cache held, None if the host does not tell
    """
    lengths = [load.output_len] * load.requests + [load.arriving_output] * load.arriving
    if len(arrivals) != len(lengths) or not all(arrivals):
        return {}, INCOMPLETE
    complete = all(len(a) == length for a, length in zip(arrivals, lengths, strict=True))
    seconds = max(of_one[-1] for of_one in arrivals)
    waits = [a[0] - since for a, since in zip(arrivals, sent or [0.0] * len(arrivals), strict=True)]
    decodes = arrivals[: load.requests]
    found = {
        "seconds": seconds,
        FIRST_SECONDS: max(of_one[:FIRST_TOKENS][-1] for of_one in decodes),
        OUTPUT: sum(map(len, arrivals)) / seconds,
        "ttft_ms": 1e3 * statistics.fmean(waits[load.requests :] or waits),
    }
    if load.kind in (Kind.PROMPTS, Kind.HITS):
        found[INPUT] = load.input_tokens / max(of_one[0] for of_one in arrivals)
    told = [tokens for tokens in cached[: load.requests] if tokens is not None]
    if load.held and told:
        found["cached_tokens_per_prompt"] = min(told)
    per_token = [(a[-1] - a[0]) / (len(a) - 1) for a in decodes if len(a) > 1]
    if per_token:
        found["tpot_ms"] = 1e3 * statistics.fmean(per_token)
    begin, end = max(a[0] for a in decodes), min(a[-1] for a in decodes)
    steps = [b - a for one in decodes for a, b in itertools.pairwise(one) if a >= begin and b <= end]
    if steps:
        for name, share in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
            found[f"step_ms_{name}"] = 1e3 * float(np.percentile(steps, share))
    return found, "" if complete else INCOMPLETE
