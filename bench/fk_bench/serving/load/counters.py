"""Counters of a server during a load: prefix-cache hits and accepted draft tokens, from its own endpoints.

vLLM and our server have counters at /metrics. SGLang has them there with --enable-metrics, and its mean acceptance
length since the start at /server_info.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from fk_bench.serving.load.client import Client
from fk_bench.serving.load.metrics import Trace

# our name: names of a server, added up over its labels (ranks, sources)
_COUNTERS = {
    "cached": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total",),
}
_BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_SYNTHETIC = "fastkernels:spec_decode_synthetic"


async def read(client: Client) -> dict[str, float]:
    """The counters that the server has; {} without any."""
    found = parse(await client.get("/metrics"))
    if not found:
        found = _server_info(await client.get("/server_info"))
    return found


def parse(text: str) -> dict[str, float]:
    """Counters in Prometheus' text format; {} for anything else."""
    found: dict[str, float] = {}
    with contextlib.suppress(ValueError):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                for name, known in _COUNTERS.items():
                    if sample.name in known:
                        found[name] = found.get(name, 0.0) + sample.value
                if sample.name == _BY_PLACE:
                    name = f"accepted_{sample.labels.get('position', '')}"
                    found[name] = found.get(name, 0.0) + sample.value
                if sample.name == _SYNTHETIC and sample.value:
                    found["synthetic"] = 1.0
                if sample.name == "sglang:spec_accept_length" and sample.value:
                    found["accept_length"] = sample.value
    return found


def _server_info(text: str) -> dict[str, float]:
    with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError):
        states = json.loads(text).get("internal_states") or ()
        lengths = [s["avg_spec_accept_length"] for s in states if s.get("avg_spec_accept_length")]
        if lengths:
            return {"accept_length": float(sum(lengths) / len(lengths))}
    return {}


def metrics_of(
    traces: Sequence[Trace], before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[dict[str, float], str | None]:
    """(metrics of a load, where the cached tokens are from: 'usage', '/metrics' or None if unknown).

    cached_prompt_tokens    prompt tokens that the server found in its prefix cache
    prefix_cache_hit_rate   their share of all prompt tokens
    spec_acceptance_rate    accepted draft tokens / draft tokens
    spec_acceptance_length  tokens of a step, with the one that needs no draft
    spec_acceptance_rate_N  share of the steps with drafts that accepted the one in place N, from 0
    """
    done = [t for t in traces if t.ok]
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    metrics: dict[str, float] = {}
    reported = [t.cached_tokens for t in done if t.cached_tokens is not None]
    source = "usage" if reported else "/metrics" if "cached" in grown else None
    if source:
        metrics["cached_prompt_tokens"] = float(sum(reported)) if reported else grown["cached"]
        prompt = sum(t.prompt_tokens or 0 for t in done)
        if prompt:
            metrics["prefix_cache_hit_rate"] = metrics["cached_prompt_tokens"] / prompt
    if grown.get("draft_tokens"):
        metrics["spec_acceptance_rate"] = grown.get("accepted", 0.0) / grown["draft_tokens"]
    if grown.get("drafts"):
        metrics["spec_acceptance_length"] = 1.0 + grown.get("accepted", 0.0) / grown["drafts"]
        for name, value in grown.items():
            if (place := name.removeprefix("accepted_")) != name:
                metrics[f"spec_acceptance_rate_{place}"] = value / grown["drafts"]
    elif "accept_length" in after:
        metrics["spec_acceptance_length"] = after["accept_length"]
    return metrics, source
