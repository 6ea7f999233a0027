"""One run of a load: the prompts that a host gets, and the metrics of the seconds at which its tokens came."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fk_bench.e2e.loads import Kind, Load, held_tokens
from fk_bench.e2e.media import Media, MediaPlace
from fk_bench.e2e.ratios import FIRST_SECONDS, INPUT, LATENCY, OUTPUT, REQUESTS
from fk_bench.offline.host import prompts_of

FIRST_TOKENS = 16  # of the first run of a load, which is not compared
# Tokens of a prompt that hosts compute again although their cache holds it: the last block, and what rounding adds.
AGAIN = 272
INCOMPLETE = "not all tokens were generated"


class Prompts:
    """The prompts of runs. Tokens that the prefix cache holds are the same in every run and load.

    Media are new in every run: each host draws them from the run's seed.
    """

    def __init__(self, seed: str, loads: Sequence[Load], place: MediaPlace, media: Media | None = None):
        self.vocab, self.front, self.media = place.texts, list(place.front), media
        vocab = self.vocab
        self.held = [
            prompts_of(f"{seed} held {i}", 1, length, vocab)[0] for i, length in enumerate(held_tokens(loads))
        ]

    def work(self, load: Load, seed: str) -> dict[str, Any]:
        """The line of input of offline.py for a run; new tokens are drawn from `seed`."""
        work = {"prompts": self.of(load, seed), "output_len": load.output_len, "arrivals": True}
        if self.media:
            work["media"] = {**vars(self.media), "seed": seed}
        if load.arriving:
            arriving = self._new(f"{seed} arriving", load.arriving, load.arriving_input)
            after = [(i + 1) * load.gap for i in range(load.arriving)]
            work["later"] = {"prompts": arriving, "output_len": load.arriving_output, "after": after}
        return work

    def of(self, load: Load, seed: str) -> list[list[int]]:
        """The prompts of the requests that start together."""
        new = self._new(seed, load.requests, load.input_len - load.held)
        return [self.held[i][: load.held] + rest for i, rest in enumerate(new)] if load.held else new

    def _new(self, seed: str, requests: int, length: int) -> list[list[int]]:
        rest = prompts_of(seed, requests, length - len(self.front), self.vocab)
        return [self.front + prompt for prompt in rest]


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


def metrics_of_answer(
    answer: Mapping[str, Any], load: Load, place: MediaPlace
) -> tuple[dict[str, float], str]:  # fmt: skip
    """As metrics_of, of an answer of offline.py, with the time in which the host read the media of a request."""
    found, problem = metrics_of(answer["arrivals"], load, answer["sent"], answer["cached"], place.features)
    if answer.get("read"):
        found["read_ms"] = 1e3 * statistics.fmean(answer["read"])
    return found, problem


def metrics_of(
    arrivals: Sequence[Sequence[float]], load: Load, sent: Sequence[float] = (),
    cached: Sequence[int | None] = (), features: int = 0,
) -> tuple[dict[str, float], str]:  # fmt: skip
    """The metrics of a run, and what is wrong with it. arrivals: seconds to each token of each request.

    A step is the time between two tokens of a request while every request decodes. With prompts that arrive later,
    TTFT is theirs, from the time when they were sent; steps and TPOT are those of the decodes around them. Of texts to
    embed, a request's only arrival is its vector.

    sent    seconds at which each request was sent (default: 0)
    cached  tokens of each prompt that the prefix cache held, None if the host does not tell
    features  tokens of a prompt for its media, more than the load names
    """
    lengths = [load.output_len or 1] * load.requests + [load.arriving_output] * load.arriving
    if len(arrivals) != len(lengths) or not all(arrivals):
        return {}, INCOMPLETE
    complete = all(len(a) == length for a, length in zip(arrivals, lengths, strict=True))
    seconds = max(of_one[-1] for of_one in arrivals)
    waits = [a[0] - since for a, since in zip(arrivals, sent or [0.0] * len(arrivals), strict=True)]
    if load.kind is Kind.EMBED:
        found = {
            "seconds": seconds, FIRST_SECONDS: seconds, REQUESTS: load.requests / seconds,
            LATENCY: 1e3 * statistics.fmean(waits), INPUT: load.input_tokens / seconds,
        }  # fmt: skip
        return found, "" if complete else INCOMPLETE
    decodes = arrivals[: load.requests]
    found = {
        "seconds": seconds,
        FIRST_SECONDS: max(of_one[:FIRST_TOKENS][-1] for of_one in decodes),
        OUTPUT: sum(map(len, arrivals)) / seconds,
        "ttft_ms": 1e3 * statistics.fmean(waits[load.requests :] or waits),
    }
    if load.kind in (Kind.PROMPTS, Kind.HITS):
        tokens = load.input_tokens + len(arrivals) * features
        found[INPUT] = tokens / max(of_one[0] for of_one in arrivals)
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
