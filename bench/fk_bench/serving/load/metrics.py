"""Metrics of request traces: TTFT, TPOT, ITL, E2EL, throughput and goodput, defined once for all commands.

TTFT    first chunk with a choice (its text may be empty) - send
E2EL    last chunk with a choice - send, on the client's clock
TPOT    (E2EL - TTFT) / (n - 1); none if n < 2, n from the server's usage
ITL     gaps between chunks, and how many tokens a chunk carried
goodput requests that meet every SLO, per second
lag     send - the time at which an open loop or a trace wanted to send
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fk_bench.serving.load.client import Prompt

PERCENTILES = (50, 90, 95, 99)
SLO_NAMES = ("ttft", "tpot", "e2el")


@dataclass
class Chunk:
    """One streamed chunk with a choice. `tokens` is None if the server does not say how many it has."""

    time: float  # seconds, the client's monotonic clock
    tokens: int | None = None


@dataclass
class Trace:
    """One request as the client saw it. Times are seconds of one monotonic clock.

    cached_tokens  prompt tokens that the server found in its prefix cache; None if it does not say
    turn           of a conversation, from 0
    due            when an open loop wanted to send it; None in a closed loop
    """

    sent: float
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # the server's usage
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int | None = None
    turn: int = 0
    due: float | None = None
    request: Prompt | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.chunks) and self.output_tokens is not None

    @property
    def ttft(self) -> float:
        return self.chunks[0].time - self.sent

    @property
    def e2el(self) -> float:
        return self.chunks[-1].time - self.sent

    @property
    def tpot(self) -> float | None:
        n = self.output_tokens or 0
        return (self.e2el - self.ttft) / (n - 1) if n >= 2 else None

    @property
    def itl(self) -> list[float]:
        """Gaps between chunks. A closing chunk without tokens does not count."""
        times = [c.time for i, c in enumerate(self.chunks) if i == 0 or c.tokens != 0]
        return [b - a for a, b in itertools.pairwise(times)]

    def to_dict(self, start: float) -> dict[str, object]:
        """For the file of requests: times in seconds, the send relative to `start`, the chunks to the send."""
        return {
            "sent_s": round(self.sent - start, 6),
            "chunks_s": [round(c.time - self.sent, 6) for c in self.chunks],
            "chunk_tokens": [c.tokens for c in self.chunks],
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "turn": self.turn,
            "due_s": None if self.due is None else round(self.due - start, 6),
            "finish_reason": self.finish_reason,
            "error": self.error,
        }

    def meets(self, slo_ms: Mapping[str, float]) -> bool:
        """Whether every SLO holds. A missing TPOT violates nothing; a failed request meets none."""
        if not self.ok:
            return False
        values = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}
        return all(values[k] is None or values[k] * 1e3 <= limit for k, limit in slo_ms.items())  # type: ignore[operator]


def parse_slo(text: str) -> dict[str, float]:
    """'ttft:500,tpot:50' -> {'ttft': 500.0, 'tpot': 50.0} (milliseconds). Raises ValueError."""
    slo: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition(":")
        if name not in SLO_NAMES:
            raise ValueError(
                f"--slo: {name!r} is not one of {', '.join(SLO_NAMES)} (as in ttft:500,tpot:50, in ms)"
            )
        try:
            slo[name] = float(value)
        except ValueError:
            raise ValueError(f"--slo: {part!r} has no number of milliseconds, as in {name}:500") from None
        if not slo[name] > 0:
            raise ValueError(f"--slo: {name} must be above 0 ms, got {value}")
    return slo


def distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    """{name_mean, name_p50, ...}; empty without values."""
    if not len(values):
        return {}
    found = {f"{name}_mean": float(np.mean(values))}
    for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES)):  # noqa: B905
        found[f"{name}_p{p}"] = float(value)
    return found


def summarize(
    traces: Sequence[Trace], gpus: int = 0, slo_ms: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The metrics of one load, from the first send to the last chunk of any request.

    Throughput counts tokens of successful requests. Tokens/s per user is 1 / TPOT of a request (mean over requests);
    per GPU is the output throughput over `gpus`, left out without a GPU.
    """
    done = [t for t in traces if t.ok]
    metrics: dict[str, float] = {"requests": len(traces), "requests_failed": len(traces) - len(done)}
    if not done:
        return metrics
    duration = max(t.chunks[-1].time for t in done) - min(t.sent for t in traces)
    output = sum(t.output_tokens or 0 for t in done)
    prompt = sum(t.prompt_tokens or 0 for t in done)
    metrics["duration_s"] = duration
    metrics["prompt_tokens"], metrics["output_tokens"] = prompt, output
    metrics.update(distribution("ttft_ms", [t.ttft * 1e3 for t in done]))
    later = [t.ttft * 1e3 for t in done if t.turn]
    if later:
        metrics["requests_later_turns"] = len(later)
        metrics.update(distribution("ttft_first_turn_ms", [t.ttft * 1e3 for t in done if not t.turn]))
        metrics.update(distribution("ttft_later_turns_ms", later))
    if lags := [(t.sent - t.due) * 1e3 for t in done if t.due is not None]:
        metrics["lag_ms_mean"], metrics["lag_ms_max"] = float(np.mean(lags)), max(lags)
    tpot = [t.tpot for t in done if t.tpot is not None]
    metrics.update(distribution("tpot_ms", [v * 1e3 for v in tpot]))
    metrics.update(distribution("itl_ms", [gap * 1e3 for t in done for gap in t.itl]))
    metrics.update(distribution("e2el_ms", [t.e2el * 1e3 for t in done]))
    carried = [c.tokens for t in done for c in t.chunks if c.tokens]
    if carried:
        metrics["tokens_per_chunk_mean"] = float(np.mean(carried))
    rates = [1.0 / v for v in tpot if v > 0]
    if rates:
        metrics["tokens_per_s_per_user"] = float(np.mean(rates))
    if duration > 0:
        metrics["requests_per_s"] = len(done) / duration
        metrics["output_tokens_per_s"] = output / duration
        metrics["total_tokens_per_s"] = (output + prompt) / duration
        if gpus:
            metrics["output_tokens_per_s_per_gpu"] = output / duration / gpus
        if slo_ms:
            met = sum(t.meets(slo_ms) for t in traces)
            metrics["goodput_requests_per_s"], metrics["slo_attainment"] = met / duration, met / len(traces)
    return metrics
