"""Puts one load on one running server, and reads what the server counted meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fk_bench.core import machine
from fk_bench.serving.config import CompareConfig, Level
from fk_bench.serving.fleet import Running
from fk_bench.serving.load import arrivals, counters, metrics, replay, search
from fk_bench.serving.load.client import Client, Prompt
from fk_bench.serving.load.datasets import Dataset
from fk_bench.serving.load.metrics import Trace
from fk_bench.serving.summary import SYNTHETIC

WARM_UP = -1  # number of the round with the warm-up prompts of a load
PROFILE = -2  # number of the round with the profiler on
# Cached tokens beyond one a request (a common first token) and this share of all prompts are no accident.
_CHANCE = 0.01


@dataclass
class Measured:
    """One load on one server. `case` says how it was measured; `warning` why its numbers may mislead."""

    traces: list[Trace]
    metrics: dict[str, float]
    case: dict[str, Any] = field(default_factory=dict)
    warning: str = ""


class Loads:
    """The prompts of a run's loads, the same for every lane, and the way each load sends them."""

    def __init__(self, config: CompareConfig, data: Dataset):
        self.config, self.data, self.seed = config, data, config.seed or 0
        self.trace = (
            replay.read_trace(config.trace, config.trace_block_size, config.trace_requests)
            if config.trace
            else []
        )
        self.samples: dict[tuple[Level, int], list[Prompt]] = {}
        self._replayed: tuple[tuple[Level, int] | None, list[Prompt]] = (None, [])
        for level in config.levels:
            self.samples[level, WARM_UP] = data.warm_up(level.label, level.warmup, **self._shape(level))
        for r in range(config.rounds):
            for level in config.levels:
                if not level.search and level.kind != "trace":
                    self.samples[level, r] = data.draw(
                        level.label, r, config.prompts_at(level), **self._shape(level)
                    )
        if config.profile:
            for level in config.levels:
                self.samples[level, PROFILE] = data.warm_up(
                    f"profile {level.label}", level.warmup, **self._shape(level)
                )

    def _shape(self, level: Level) -> dict[str, Any]:
        of = self.config
        return {"lengths": of.lengths(level), "prefix": of.prefix_of(level), "turns": of.turns_of(level)}

    def prompts(self, level: Level, r: int) -> list[Prompt]:
        """Of a round. Those of a trace are drawn when they are needed: a day of requests has gigabytes of tokens."""
        if level.kind != "trace":
            return self.samples[level, r]
        if self._replayed[0] != (level, r):
            seed, size = f"{self.seed + r}/{level.label}", self.config.trace_block_size
            self._replayed = (level, r), replay.prompts_of(self.trace, self.data.vocabulary, seed, size)
        return self._replayed[1]

    def needs(self) -> list[tuple[int, int, int]]:
        """Of every sample: (requests that a server holds at once, tokens of the longest one, tokens of all these)."""
        found = []
        for (level, _), sample in self.samples.items():
            together, most = level.in_flight, longest(sample)
            found.append((together, most, together * most))
        if self.trace:  # its requests differ by orders of magnitude: the longest ones do not all come at once
            together = Level("trace", 1.0).in_flight
            lengths = sorted((room(r.input_len + r.output_len) for r in self.trace), reverse=True)
            found.append((together, lengths[0], sum(lengths[:together])))
        return found

    async def warm_up(self, running: Running, level: Level) -> list[Trace]:
        return await self._send(running, self.samples[level, WARM_UP], _warm_up_load(level), self.seed)

    async def measure(self, running: Running, level: Level, r: int) -> Measured:
        """One round of a load."""
        return await self._measure(running, level, self.prompts(level, r), self.seed + r)

    async def _measure(
        self, running: Running, level: Level, prompts: Sequence[Prompt], seed: int
    ) -> Measured:
        config, case = self.config, dict[str, Any]()
        async with Client(running.url, running.model, config.request_timeout) as http:
            if config.flush and (by := await http.flush()):
                case["flushed_by"] = by
            before = await counters.read(http)
            traces = await self._send(running, prompts, level, seed, http)
            after = await counters.read(http)
            counted, source = counters.metrics_of(traces, before, after)
        gpus = config.tensor_parallel if machine.machine().gpus else 0
        found = {**metrics.summarize(traces, gpus, config.slo), **counted}
        if after.get("synthetic"):
            case[SYNTHETIC] = "as its server says"
        if source:
            case["cached_tokens_from"] = source
        warning = "" if config.shares_prefixes(level) else cached_warning(found)
        if warning:
            case["warning"] = warning
        return Measured(traces, {k: v for k, v in found.items() if math.isfinite(v)}, case, warning)

    async def search(
        self, running: Running, level: Level, r: int
    ) -> tuple[Measured, list[tuple[Level, Measured]]]:
        """(the highest load that met the SLOs, every load that was tried). If none met them, the lowest load."""
        probes: dict[float, tuple[Level, Measured]] = {}

        async def meets(value: float) -> bool:
            at = level.probe(value)
            prompts = self.data.draw(
                f"{level.label} at {value:g}", r, self.config.prompts_at(at), **self._shape(level)
            )
            probes[value] = at, await self._measure(running, at, prompts, self.seed + r)
            return probes[value][1].metrics.get("slo_attainment", 0.0) >= self.config.slo_attainment

        assert level.start is not None
        found = await search.highest(meets, level.start, level.value, whole=level.search == "concurrency")
        best = probes[found.value or level.start][1]
        name = f"max_{level.search}_within_slo"
        case = {**best.case, "probes": {f"{v:g}": met for v, met in found.tried.items()}}
        warning = best.warning
        if found.at_limit:
            warning = f"the highest load of --search, {level.value:g}, met the SLOs: raise its upper limit"
        elif not found.value:
            warning = f"no load met the SLOs, not even the lowest of --search, {level.start:g}"
        case.update({"warning": warning} if warning else {})
        return Measured(best.traces, {**best.metrics, name: found.value}, case, warning), list(
            probes.values()
        )

    async def profile(self, running: Running, level: Level) -> tuple[list[Trace], str]:
        """A load with the profiler on: (its traces, '' or why the server cannot)."""
        async with Client(running.url, running.model, self.config.request_timeout) as http:
            status = await http.post("/start_profile")
            if status != 200:
                return [], f"POST /start_profile: {'no answer' if status is None else f'HTTP {status}'}"
            try:
                traces = await self._send(
                    running, self.samples[level, PROFILE], _warm_up_load(level), self.seed, http
                )
            finally:
                status = await http.post("/stop_profile")
            return traces, "" if status == 200 else f"POST /stop_profile: HTTP {status}"

    async def _send(
        self, running: Running, prompts: Sequence[Prompt], level: Level, seed: int, http: Client | None = None
    ) -> list[Trace]:
        if http is None:
            async with Client(running.url, running.model, self.config.request_timeout) as http:
                return await self._send(running, prompts, level, seed, http)
        encode = self.data.vocabulary.encode if self.data.vocabulary.tokenizer else None
        work: Coroutine[Any, Any, list[Trace]]
        if level.kind == "concurrency":
            await http.connect(min(int(level.value), len(prompts)))
            work = arrivals.closed_loop(http, prompts, int(level.value), encode)
        else:
            await http.connect(16)
            work = arrivals.open_loop(http, prompts, self._due(level, len(prompts), seed), encode)
        return await watched(running, work)

    def _due(self, level: Level, count: int, seed: int) -> list[float]:
        config = self.config
        if level.kind == "trace":
            return [r.at / level.value for r in self.trace[:count]]
        rates = [level.value] * count
        if level.kind == "ramp":
            assert config.ramp_up_strategy is not None and level.start is not None
            rates = arrivals.ramp(count, config.ramp_up_strategy, level.start, level.value)
        return arrivals.due_times(rates, config.burstiness, seed)


def _warm_up_load(level: Level) -> Level:
    """Itself, or a closed loop: the first requests of a trace may be far apart, and those of a search are not known."""
    constant = level.kind in ("concurrency", "rate")
    return level if constant else Level("concurrency", level.warmup)


def cached_warning(found: Mapping[str, float]) -> str:
    """A warning if prompts that share nothing were in the server's prefix cache, else ''."""
    cached, prompt = found.get("cached_prompt_tokens", 0.0), found.get("prompt_tokens", 0.0)
    if cached <= found.get("requests", 0.0) + _CHANCE * prompt:
        return ""
    return (
        f"{cached:.0f} of {prompt:.0f} prompt tokens were in the server's prefix cache, though these prompts share no "
        "prefix: TTFT is too low. An earlier run sent them: leave --seed out, or restart the server."
    )


def longest(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt (a conversation: with all turns) with its output, plus a margin for the server;
    2048 for a text prompt."""
    lengths = []
    for p in prompts:
        first = len(p.tokens) if isinstance(p.tokens, list) else 2048
        lengths.append(first + p.output_len + sum(len(turn) + p.output_len for turn in p.later))
    return room(max(lengths))


def room(tokens: int) -> int:
    """Tokens that a server needs for a request of so many: a margin, in steps of 64."""
    return -(-(tokens + 64) // 64) * 64


async def watched(running: Running, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`; raises ServerError at once if the server ends meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=0.25)
            running.check()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
