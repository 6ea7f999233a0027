"""The engine's core: requests in, one step at a time, outputs out. Not thread-safe: one thread owns it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastkernels.models import build, weights

from . import candidates
from .blocks import BlockManager
from .config import EngineConfig
from .detokenizer import Detokenizer
from .request import CompletionOutput, Request, RequestOutput, Status
from .runner import ModelRunner
from .sampling_params import SamplingParams
from .scheduler import Batch, QueueFull, Scheduler


@dataclass
class StepStats:
    """What a step did, for metrics. Times in seconds."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    finished: list[tuple[str, float]] = field(default_factory=list)  # (finish reason, end-to-end time)


class LLMEngine:
    """Builds the model from an EngineConfig and serves requests.

    Raises CheckpointError, UnknownName or ValueError when it is built from something that cannot be served.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        folder = weights.resolve(config.model)
        self.hf_config = build.load_config(folder)
        self.tokenizer = None if config.skip_tokenizer_init else _tokenizer(config.tokenizer or folder)
        self.eos_token_ids = _eos_token_ids(folder, self.hf_config, self.tokenizer)
        self.runner = ModelRunner(config, folder, self.hf_config)
        limits = self.runner.limits
        self.max_model_len = limits.max_model_len
        self.blocks = BlockManager(limits.num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.blocks, config.max_num_seqs, limits.max_num_batched_tokens, config.max_waiting
        )
        self.requests: dict[str, Request] = {}
        self.stats = StepStats()
        self.patched: candidates.Patched | None = candidates.from_environment(self.runner)

    def make_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """A request, checked, not yet queued. Safe in any thread. Raises ValueError for what cannot be served."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer, which skip_tokenizer_init left out")
            text, ids = prompt, list(self.tokenizer(prompt).input_ids)
        else:
            text, ids = None, list(prompt)
        vocab = self.hf_config.vocab_size
        if not ids:
            raise ValueError("the prompt is empty")
        wrong = next((i for i in ids if not isinstance(i, int) or not 0 <= i < vocab), None)
        if wrong is not None:
            raise ValueError(f"prompt token id {wrong!r} is not in the vocabulary (0 to {vocab - 1})")
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the maximum context length is {self.max_model_len}"
                " tokens, output included"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = {i for i in params.stop_token_ids or () if 0 <= i < vocab}
        ends |= set() if params.ignore_eos else set(self.eos_token_ids)
        request = Request(request_id, ids, params, max_tokens, frozenset(ends), text)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which skip_tokenizer_init left out")
        if self.tokenizer is not None and params.detokenize:
            request.detokenizer = Detokenizer(
                self.tokenizer, ids, params.stop_strings, params.include_stop_str_in_output,
                params.skip_special_tokens,
            )  # fmt: skip
        return request

    def add_request(
        self, request_id: str, prompt: str | Sequence[int] | Request, params: SamplingParams | None = None
    ) -> None:
        """Queue a request. Raises ValueError for one that cannot be served, QueueFull when too many wait."""
        if request_id in self.requests:
            raise ValueError(f"there is a request {request_id!r} already")
        if not isinstance(prompt, Request):
            prompt = self.make_request(request_id, prompt, params or SamplingParams())
        self.scheduler.add(prompt)
        self.requests[request_id] = prompt

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Stop requests and free their blocks; unknown ids are passed over. Returns their last outputs."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        found = [self.requests.pop(i) for i in ids if i in self.requests]
        self.scheduler.remove(found)
        for request in found:
            request.finish("abort")
            self.stats.finished.append(("abort", time.monotonic() - request.arrival))
        return [_output(request, []) for request in found]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns an output for each request that has a new token."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        tokens = self.runner.execute(batch)
        self.scheduler.computed(batch)
        now = time.monotonic()
        for request, token in zip(batch.requests, tokens, strict=True):
            self._count(request, batch, now)
            request.output_token_ids.append(token)
            _check_end(request, token)
        finished = [r for r in batch.requests if r.status is Status.FINISHED]
        self.scheduler.remove(finished)
        for request in finished:
            del self.requests[request.request_id]
            self.stats.finished.append((request.finish_reason or "", now - request.arrival))
        return [_output(r, [t]) for r, t in zip(batch.requests, tokens, strict=True)]

    def take_stats(self) -> StepStats:
        """What happened since the last call."""
        stats, self.stats = self.stats, StepStats()
        return stats

    def _count(self, request: Request, batch: Batch, now: float) -> None:
        self.stats.generation_tokens += 1
        if request.first_token_time is None or request.last_token_time is None:
            request.first_token_time = now
            self.stats.prompt_tokens += len(request.prompt_token_ids)
            self.stats.ttft.append(now - request.arrival)
        else:
            self.stats.itl.append(now - request.last_token_time)
        request.last_token_time = now


def _check_end(request: Request, token: int) -> None:
    """Finish the request if its last token ends it: an end token, a stop string, or the length."""
    enough = len(request.output_token_ids) >= request.params.min_tokens
    text = request.detokenizer
    if token in request.end_token_ids and enough:
        if text is not None:
            text.finish(look=False)  # the end token itself is no text
        asked = token in (request.params.stop_token_ids or ())
        request.finish("stop", token if asked else None)
        return
    stop = text.append(token, look=enough) if text is not None else None
    long = len(request.output_token_ids) >= request.max_tokens
    if stop is None and long and text is not None:
        stop = text.finish(look=enough)
    if stop is not None:
        request.finish("stop", stop)
    elif long:
        request.finish("length")


def _output(request: Request, new: list[int]) -> RequestOutput:
    done, detokenizer = request.status is Status.FINISHED, request.detokenizer
    if done and detokenizer is not None and request.finish_reason == "abort":
        detokenizer.finish(look=False)
    text = detokenizer.text if detokenizer is not None else ""
    out = CompletionOutput(
        0, text, list(request.output_token_ids), request.finish_reason, request.stop_reason
    )
    delta = detokenizer.take(final=done) if detokenizer is not None else ""
    return RequestOutput(
        request.request_id, request.prompt, request.prompt_token_ids, [out], done, delta, new
    )


def _tokenizer(source: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise weights.CheckpointError(
            f"the tokenizer of {source} cannot be used ({error}); token ids work without: skip_tokenizer_init"
        ) from error


def _eos_token_ids(folder: Path, hf_config: Any, tokenizer: Any) -> list[int]:
    """EOS of generation_config.json (instruct models have several), else of config.json, and the tokenizer's."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:
        found = None
    found = found if found is not None else getattr(hf_config, "eos_token_id", None)
    ids = list(found) if isinstance(found, (list, tuple)) else [found]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return sorted({i for i in ids if isinstance(i, int)})


__all__ = ["LLMEngine", "QueueFull", "StepStats"]
