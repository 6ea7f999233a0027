"""The server's Prometheus metrics. Metrics with the same meaning have vLLM's names, so that its dashboards work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fastkernels.core import dispatch
from fastkernels.engine.engines.engine import Engine, StepStats
from fastkernels.engine.http.answers.histogram import Histogram, one_two_five
from fastkernels.engine.scheduling.denoising import ImageRequest
from fastkernels.engine.scheduling.encoding import BudgetScheduler, EncodeRequest
from fastkernels.engine.scheduling.payoff import Payoff
from fastkernels.engine.scheduling.rendering import RenderRequest
from fastkernels.engine.scheduling.request import Request
from fastkernels.engine.scheduling.rollout import FrameRequest
from fastkernels.engine.scheduling.speaking import SpeechRequest
from fastkernels.engine.speech.vocabulary import TASKS

LATENCY = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 1200.0,
)  # fmt: skip
TTFT = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
ITL = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TTFS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
REASONS = ("stop", "length", "abort")


class Metrics:
    """Updated by the engine's thread (`observe`), read by GET /metrics (`text`). refused: requests answered by 429."""

    def __init__(self, model_name: str, engine: Engine):
        self.engine, self.refused, self.failed_steps = engine, 0, 0
        self._labels = {"model_name": model_name, "engine": "0"}
        self._prompt_tokens = self._generation_tokens = self._denoise_steps = self._reused_steps = (
            self._images
        ) = self._frames = 0
        self._ended = dict.fromkeys(REASONS, 0)
        self._audio = dict.fromkeys(TASKS, 0)
        self._audio_seconds = 0.0
        self._sound = 0.0
        tokens = one_two_five(engine.max_model_len)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, buckets)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "Arrival to first token", TTFT),
                ("inter_token_latency_seconds", "Between two tokens", ITL),
                ("request_time_per_output_token_seconds", "Mean time between a request's tokens", ITL),
                ("e2e_request_latency_seconds", "Arrival to end", LATENCY),
                ("request_queue_time_seconds", "Arrival to first scheduling", LATENCY),
                ("request_prefill_time_seconds", "First scheduling to first token", LATENCY),
                ("request_decode_time_seconds", "First to last token", LATENCY),
                ("request_inference_time_seconds", "First scheduling to last token", LATENCY),
                ("iteration_tokens_total", "Tokens of a step", STEP_TOKENS),
                ("request_prompt_tokens", "Prompt tokens of a request", tokens),
                ("request_generation_tokens", "Tokens generated for a request", tokens),
                ("request_params_n", "The n of a request", (1, 2, 5, 10, 20, 50, 100)),
                ("request_params_max_tokens", "The max_tokens of a request", tokens),
            )
        }
        if engine.kind == "Speak":
            name = "time_to_first_sound_seconds"
            self._histograms[name] = Histogram(f"fastkernels:{name}", "Arrival to first sound", TTFS)
        self.registry = CollectorRegistry()
        self.registry.register(self)  # type: ignore[arg-type]
        ProcessCollector(registry=self.registry)

    def count_audio(self, task: str, seconds: float) -> None:
        """Count a finished transcription or translation of so many seconds of audio."""
        self._audio[task] += 1
        self._audio_seconds += seconds

    def observe(self, stats: StepStats) -> None:
        """Add the stats of a step. 256 requests with one token each take 19 us (Xeon core); each end takes 1.5 us."""
        self._prompt_tokens += stats.prompt_tokens
        self._generation_tokens += stats.generation_tokens
        if stats.generation_tokens:
            self._observe("iteration_tokens_total", [stats.prompt_tokens + stats.generation_tokens])
        self._observe("time_to_first_token_seconds", stats.ttft)
        self._observe("inter_token_latency_seconds", stats.itl)
        if stats.finished:
            self._observe_ends(stats.finished)
        if stats.encoded:
            self._observe_encoded(stats.encoded)
        self._ended["abort"] += stats.aborted
        self._denoise_steps += stats.denoise_steps
        self._reused_steps += stats.denoise_steps_reused
        self._frames += stats.frames
        if stats.images:
            self._observe_images(stats.images)
        self._sound += stats.sound
        if stats.ttfs:
            self._observe("time_to_first_sound_seconds", stats.ttfs)
        if stats.speeches:
            self._observe_speeches(stats.speeches)

    def _observe(self, name: str, values: Sequence[float]) -> None:
        self._histograms[name].observe(values)

    def _observe_ends(self, requests: Sequence[Request]) -> None:
        now = time.monotonic()
        for request in requests:
            reason = request.finish_reason or "abort"
            self._ended[reason] = self._ended.get(reason, 0) + 1
        self._observe("e2e_request_latency_seconds", [now - r.arrival for r in requests])
        self._observe("request_prompt_tokens", [len(r.prompt_token_ids) for r in requests])
        self._observe("request_generation_tokens", [len(r.output_token_ids) for r in requests])
        self._observe("request_params_n", [r.params.n for r in requests if r.index == 0])
        self._observe("request_params_max_tokens", [r.params.max_tokens or r.max_tokens for r in requests])
        times = [
            (r.arrival, r.scheduled_time, r.first_token_time, r.last_token_time, len(r.output_token_ids))
            for r in requests
            if r.scheduled_time is not None
            and r.first_token_time is not None
            and r.last_token_time is not None
        ]
        self._observe("request_queue_time_seconds", [start - came for came, start, _, _, _ in times])
        self._observe("request_prefill_time_seconds", [first - start for _, start, first, _, _ in times])
        self._observe("request_decode_time_seconds", [last - first for _, _, first, last, _ in times])
        self._observe("request_inference_time_seconds", [last - start for _, start, _, last, _ in times])
        means = [(last - first) / (n - 1) for _, _, first, last, n in times if n > 1]
        self._observe("request_time_per_output_token_seconds", means)

    def _observe_encoded(self, requests: Sequence[EncodeRequest]) -> None:
        now = time.monotonic()
        self._ended["stop"] += len(requests)
        self._observe("iteration_tokens_total", [sum(r.num_tokens for r in requests)])
        self._observe("e2e_request_latency_seconds", [now - r.arrival for r in requests])
        whole = [getattr(r, "all_tokens", r.num_tokens) for r in requests]  # of clips, more than of a step
        self._observe("request_prompt_tokens", whole)
        waits = [r.scheduled_time - r.arrival for r in requests if r.scheduled_time is not None]
        self._observe("request_queue_time_seconds", waits)

    def _observe_images(self, requests: Sequence[ImageRequest | RenderRequest | FrameRequest]) -> None:
        now = time.monotonic()
        self._images += len(requests)
        self._ended["stop"] += len(requests)
        self._observe("e2e_request_latency_seconds", [now - r.arrival for r in requests])
        started = [r for r in requests if r.scheduled_time is not None]
        self._observe("request_queue_time_seconds", [r.scheduled_time - r.arrival for r in started])  # type: ignore[operator]
        self._observe("request_inference_time_seconds", [now - r.scheduled_time for r in started])  # type: ignore[operator]

    def _observe_speeches(self, requests: Sequence[SpeechRequest]) -> None:
        now = time.monotonic()
        self._ended["stop"] += len(requests)
        self._observe("e2e_request_latency_seconds", [now - r.arrival for r in requests])
        self._observe("request_prompt_tokens", [r.num_prompt_tokens for r in requests])
        self._observe("request_generation_tokens", [r.num_generated_tokens for r in requests])
        waits = [t - r.arrival for r in requests if (t := r.scheduled_time) is not None]
        self._observe("request_queue_time_seconds", waits)

    def collect(self) -> Iterator[Any]:
        """Called by the registry at every scrape."""
        scheduler, blocks = self.engine.scheduler, self.engine.blocks
        yield self._one(
            GaugeMetricFamily, "vllm:num_requests_running", "In execution", len(scheduler.running)
        )
        yield self._one(GaugeMetricFamily, "vllm:num_requests_waiting", "In the queue", scheduler.num_waiting)
        startup = GaugeMetricFamily(
            "fastkernels:startup_seconds", "Of the engine's start, by phase", labels=[*self._labels, "phase"]
        )
        for phase, seconds in self.engine.phases.seconds.items():
            startup.add_metric([*self._labels.values(), phase], seconds)
        yield startup
        counters: list[tuple[str, str, float]] = []
        if not isinstance(scheduler, BudgetScheduler):  # whose requests have no cache
            cache = {
                "block_size": self.engine.config.block_size,
                "num_gpu_blocks": 0
                if blocks is None
                else blocks.num_blocks * self.engine.config.data_parallel_size,
                "enable_prefix_caching": self.engine.config.enable_prefix_caching,
                "cache_dtype": self.engine.config.kv_cache_dtype,
            }
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=[*self._labels, *cache])
            info.add_metric([*self._labels.values(), *map(str, cache.values())], 1)
            yield info
            yield self._one(
                GaugeMetricFamily,
                "vllm:kv_cache_usage_perc",
                "KV blocks in use, 0 to 1",
                scheduler.cache_usage,
            )
            counters += [
                ("vllm:num_preemptions", "Preemptions", scheduler.num_preemptions),
                (
                    "vllm:prefix_cache_queries",
                    "Tokens looked up in the prefix cache",
                    scheduler.prefix_queries,
                ),
                ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", scheduler.prefix_hits),
            ]
        if self.engine.kind in ("Denoise", "DenoiseVideo", "Rollout"):
            left = self.engine.steps_left  # type: ignore[attr-defined]
            name = "fastkernels:denoise_steps_left"
            yield self._one(GaugeMetricFamily, name, "Steps of queued and running requests", left)
            counters += [
                (
                    "fastkernels:denoise_steps",
                    "Denoising steps of single images or frames",
                    self._denoise_steps,
                ),
                {
                    "Denoise": ("fastkernels:images", "Images generated", self._images),
                    "DenoiseVideo": ("fastkernels:videos", "Videos generated", self._images),
                    "Rollout": ("fastkernels:frames", "Frames generated", self._frames),
                }[self.engine.kind],
            ]
        if self.engine.kind in ("Denoise", "DenoiseVideo"):
            about = "Denoising steps of finished requests that reused an output (step_cache)"
            counters += [("fastkernels:denoise_steps_reused", about, self._reused_steps)]
        if self.engine.kind == "Speak":
            counters += [("fastkernels:speech_seconds", "Of the sound that was made", self._sound)]
        if self.engine.kind == "Render":
            counters += [("fastkernels:images", "Images rendered", self._images)]
        if (drafts := getattr(scheduler, "draft_counts", None)) is not None:
            counters += [
                ("vllm:spec_decode_num_drafts", "Sequences with drafts, of all steps", drafts.sequences),
                ("vllm:spec_decode_num_draft_tokens", "Drafts", drafts.drafts),
                ("vllm:spec_decode_num_accepted_tokens", "Accepted drafts", drafts.accepted),
            ]
            yield self._by_place(drafts.by_place)
            settings = getattr(scheduler, "speculation", None)
            if settings is not None and settings.synthetic:
                what = "1: drafts are accepted by force, for measurements"
                yield self._one(GaugeMetricFamily, "fastkernels:spec_decode_synthetic", what, 1)
        if (payoff := getattr(scheduler, "payoff", None)) is not None:
            yield from self._payoff(payoff)
            what = "Steps without drafts, which would have cost more time than they save"
            counters += [("fastkernels:spec_decode_steps_off", what, payoff.num_off)]
        counters += [
            ("vllm:prompt_tokens", "Prompt tokens processed", self._prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", self._generation_tokens),
            ("fastkernels:requests_refused", "Requests that found the queue full", self.refused),
            ("fastkernels:failed_steps", "Steps that failed and ended their requests", self.failed_steps),
        ]
        for name, text, value in counters:
            yield self._one(CounterMetricFamily, name, text, value)
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests ended, by reason", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in list(self._ended.items()):
            ended.add_metric([*self._labels.values(), reason], count)
        yield ended
        if getattr(self.engine, "audio", None) is not None:
            audio = CounterMetricFamily(
                "fastkernels:audio_requests", "Audio files recognized", labels=[*self._labels, "task"]
            )
            for task, count in self._audio.items():
                audio.add_metric([*self._labels.values(), task], count)
            yield audio
            yield self._one(
                CounterMetricFamily,
                "fastkernels:audio_seconds",
                "Of the files recognized",
                self._audio_seconds,
            )
        for histogram in self._histograms.values():
            yield histogram.family(self._labels)
        # Read from the ops' own counters.
        calls = CounterMetricFamily("fastkernels:op_calls", "Runs of an op's body", labels=["op"])
        for name, counts in dispatch.counters().items():
            calls.add_metric([name], counts["calls"])
        yield calls

    def _payoff(self, payoff: Payoff) -> Iterator[Any]:
        """The measured cost of drafts, and where they are on."""
        ratios = GaugeMetricFamily(
            "fastkernels:spec_decode_step_ratio",
            "Time of a step with drafts over one without, measured at start, by running sequences",
            labels=[*self._labels, "sequences"],
        )
        for size, ratio in payoff.ratios.items():
            ratios.add_metric([*self._labels.values(), str(size)], ratio)
        yield ratios
        what = "Running sequences up to which drafts pay: they are off above this number"
        yield self._one(GaugeMetricFamily, "fastkernels:spec_decode_largest_batch", what, payoff.largest)

    def _by_place(self, counts: Sequence[int]) -> Any:
        """Accepted drafts by their place after the last token, as far as there are any."""
        made = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts, by place",
            labels=[*self._labels, "position"],
        )  # fmt: skip
        for place, count in enumerate(counts):
            if count:
                made.add_metric([*self._labels.values(), str(place)], count)
        return made

    def _one(self, family: Any, name: str, text: str, value: float) -> Any:
        made = family(name, text, labels=list(self._labels))
        made.add_metric(list(self._labels.values()), value)
        return made

    def text(self) -> bytes:
        return generate_latest(self.registry)
