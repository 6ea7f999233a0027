"""The server's Prometheus metrics. Names are vLLM's where they mean the same, so that its dashboards work."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily

from fastkernels import dispatch
from fastkernels.env import Environment

from . import candidates
from .llm_engine import LLMEngine, StepStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REPORT_EVERY = 2.0  # seconds


class _OpCalls:
    """Reads the ops' own counters when it is asked, so that nothing is counted twice."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily("fastkernels:op_calls", "Runs of an op's body", labels=["op"])
        for name, counts in dispatch.counters().items():
            family.add_metric([name], counts["calls"])
        yield family


class Metrics:
    """Fed by the engine's thread (`observe`), read by GET /metrics (`text`)."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self.registry.register(_OpCalls())  # type: ignore[arg-type]
        label = {"model_name": model_name}

        def make(kind: Any, name: str, text: str, more: tuple[str, ...] = (), **rest: Any) -> Any:
            made = kind(f"vllm:{name}", text, ["model_name", *more], registry=self.registry, **rest)
            return made if more else made.labels(**label)

        self.running = make(Gauge, "num_requests_running", "Requests in execution")
        self.waiting = make(Gauge, "num_requests_waiting", "Requests in the queue")
        self.cache = make(Gauge, "kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1")
        self.preemptions = make(Counter, "num_preemptions", "Preemptions")
        self.prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens computed")
        self.generation_tokens = make(Counter, "generation_tokens", "Tokens generated")
        self.success = make(Counter, "request_success", "Requests ended, by reason", ("finished_reason",))
        self.ttft = make(Histogram, "time_to_first_token_seconds", "Arrival to first token", buckets=SECONDS)
        self.itl = make(Histogram, "inter_token_latency_seconds", "Between two tokens", buckets=SECONDS)
        self.e2e = make(Histogram, "e2e_request_latency_seconds", "Arrival to end", buckets=SECONDS)
        self._label, self._preempted = label, 0

    def observe(self, stats: StepStats, engine: LLMEngine) -> None:
        scheduler = engine.scheduler
        self.running.set(len(scheduler.running))
        self.waiting.set(len(scheduler.waiting))
        self.cache.set(engine.blocks.usage)
        self.preemptions.inc(scheduler.num_preemptions - self._preempted)
        self._preempted = scheduler.num_preemptions
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.generation_tokens.inc(stats.generation_tokens)
        for histogram, values in ((self.ttft, stats.ttft), (self.itl, stats.itl)):
            for value in values:
                histogram.observe(value)
        for reason, seconds in stats.finished:
            self.success.labels(**self._label, finished_reason=reason).inc()
            self.e2e.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class ReportFile:
    """$FASTKERNELS_REPORT/fastkernels-RANK-PID.json: which ops run in this process, as every host writes it."""

    def __init__(self, engine: LLMEngine):
        folder = Environment.read().report
        self.engine, self._written = engine, 0.0
        self.path = Path(folder) / f"fastkernels-0-{os.getpid()}.json" if folder else None
        self.patched = engine.patched or candidates.Patched(
            engine.runner, candidates.rows(engine.runner.model)
        )

    def write(self, force: bool = False) -> None:
        """Write the file, at most every few seconds. Readers never see half of one."""
        if self.path is None or (not force and time.monotonic() - self._written < REPORT_EVERY):
            return
        self._written = time.monotonic()
        body = {**candidates.identity(), "rows": [asdict(r) for r in self.patched.report()]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(body))
        part.replace(self.path)
