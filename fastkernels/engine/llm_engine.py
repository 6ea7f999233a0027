"""The engine's core: requests in, one step at a time, outputs out. Not thread-safe: one thread owns it.

A request's way: make_request checks it and cuts it into sequences; the scheduler picks each step's batch; step_input
makes a StepInput of it; the executor's runners compute and sample; outputs turns the tokens into text and answers.
"""

from __future__ import annotations

import json
import logging
import operator
import random
import reprlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastkernels.engine import tokenizer
from fastkernels.engine.cache.blocks import BlockManager
from fastkernels.engine.config import EngineConfig
from fastkernels.engine.execution.executor import make_executor
from fastkernels.engine.execution.startup import Phases
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.scheduling import outputs
from fastkernels.engine.scheduling.core import EngineCore, StepResult
from fastkernels.engine.scheduling.detokenizer import Detokenizer
from fastkernels.engine.scheduling.outputs import News, RequestGroup
from fastkernels.engine.scheduling.request import Request, RequestOutput
from fastkernels.engine.scheduling.scheduler import QueueFull, Scheduler
from fastkernels.models.common import build, weights
from fastkernels.patch import patch_from_environment

log = logging.getLogger("fastkernels")


@dataclass
class StepStats:
    """What happened since the last look, for metrics. Times in seconds."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)


class LLMEngine:
    """Builds the model from an EngineConfig and serves requests.

    Raises CheckpointError, UnknownName or ValueError when it is built from something that cannot be served.
    """

    def __init__(self, config: EngineConfig):
        self.phases = phases = Phases()
        self.config = config
        folder = weights.resolve(config.model)
        self.hf_config = build.load_config(folder)
        phases.mark("config")
        self.tokenizer = None if config.skip_tokenizer_init else tokenizer.load(config.tokenizer or folder)
        self.eos_token_ids = _eos_token_ids(folder, self.hf_config, self.tokenizer)
        phases.mark("tokenizer")
        with phases.counting():
            self.executor = make_executor(config, folder, self.hf_config, phases)
        limits = self.executor.limits
        self.max_model_len = limits.max_model_len
        self.blocks = BlockManager(limits.num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.blocks, config.max_num_seqs, limits.max_num_batched_tokens, config.max_waiting
        )
        overlap = config.async_scheduling
        depth = 2 if (self.executor.device.type == "cuda" if overlap is None else overlap) else 1
        self.core = EngineCore(self.scheduler, self.executor, depth)
        self.requests: dict[str, RequestGroup] = {}  # unfinished, by their id
        self._group_of: dict[int, RequestGroup] = {}  # by id of the sequence
        self._seeds = random.Random(config.seed)
        self.stats = StepStats()
        self.patched: Any = None  # the patch of an integration, which sets it
        patch_from_environment(self)
        phases.mark("rest")
        log.info("%s", phases.line())

    @property
    def runner(self) -> Any:
        """The ModelRunner of this process."""
        return self.executor.runner

    def make_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, priority: int = 0
    ) -> RequestGroup:
        """A request, checked, not yet queued. Safe in any thread. Raises ValueError for what cannot be served."""
        text, ids = (prompt, self._encode(prompt)) if isinstance(prompt, str) else (None, _token_ids(prompt))
        vocab = self.hf_config.vocab_size
        if not ids:
            raise ValueError("the prompt is empty")
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise ValueError(f"prompt token id {wrong!r} is not in the vocabulary (0 to {vocab - 1})")
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the maximum context length is {self.max_model_len}"
                " tokens, output included"
            )
        params.verify(vocab, self.config.max_logprobs)
        if params.n > self.config.max_waiting:
            raise ValueError(
                f"n must be at most {self.config.max_waiting} (max_waiting of this engine), got {params.n}"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which skip_tokenizer_init left out")
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.scheduler.check_size(len(ids), max_tokens)
        ends = {i for i in params.stop_token_ids or () if 0 <= i < vocab}
        ends |= set() if params.ignore_eos else set(self.eos_token_ids)
        group = RequestGroup(request_id, text, ids, params, [])
        for index in range(params.n):
            seed = self._seeds.getrandbits(63) if params.seed is None else _wrap(params.seed + index)
            own = params if index == 0 else replace(params, prompt_logprobs=None)
            group.sequences.append(
                Request(
                    request_id, ids, own, max_tokens, frozenset(ends), text, self._detokenizer(ids, params), seed,
                    priority, index,
                )
            )  # fmt: skip
        if params.prompt_logprobs is not None:
            group.sequences[0].prompt_logprobs = [None] * len(ids)  # steps fill in all but the first token's
        return group

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int] | RequestGroup,
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises ValueError for one that cannot be served, QueueFull when too many wait."""
        if request_id in self.requests:
            raise ValueError(f"there is a request {request_id!r} already")
        if not isinstance(prompt, RequestGroup):
            prompt = self.make_request(request_id, prompt, params or SamplingParams(), priority)
        self.scheduler.check_room(len(prompt.sequences))
        for sequence in prompt.sequences:
            self.scheduler.add(sequence)
            self._group_of[id(sequence)] = prompt
        self.requests[request_id] = prompt

    def has_room(self, request: RequestGroup) -> bool:
        """Whether add_request would take it now; an empty queue takes any request that make_request has made."""
        return self.scheduler.num_waiting + len(request.sequences) <= self.config.max_waiting

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Stop requests and free their blocks; unknown ids are passed over. Returns their last outputs."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        groups = [self.requests.pop(i) for i in dict.fromkeys(ids) if i in self.requests]
        left = {id(g): [s for s in g.sequences if s.finish_reason is None] for g in groups}
        for sequences in left.values():
            for sequence in sequences:
                sequence.finish("abort")
                if sequence.detokenizer is not None:
                    sequence.detokenizer.finish(look=False)
            self.core.end(sequences)
            self._forget(sequences)
        found = (outputs.make_output(g, [News(s) for s in left[id(g)]]) for g in groups)
        return [o for o in found if o is not None]

    def abort_all(self) -> None:
        """Stop everything: nobody is told. What is in the cache is forgotten."""
        self.core.reset()
        groups = self.requests.values()
        self.stats.finished += [s for g in groups for s in g.sequences if id(s) in self._group_of]
        self._group_of.clear()
        self.requests.clear()

    def has_unfinished_requests(self) -> bool:
        return self.core.busy

    def step(self) -> list[RequestOutput]:
        """Launch the next batch, wait for the oldest one under way, and return an output for each request with news.

        With async scheduling two batches are under way, so that the first step returns nothing. Raises what went wrong
        in a step; all requests are gone then.
        """
        try:
            done = self.core.step()
            return [] if done is None else self._read(done)
        except BaseException:  # the blocks that the step should have filled have names already
            self.abort_all()
            raise

    def take_stats(self) -> StepStats:
        """What happened since the last call. Whoever steps the engine must take it: it grows until then."""
        stats, self.stats = self.stats, StepStats()
        return stats

    def shutdown(self) -> None:
        """End the processes of other ranks: an engine that has some cannot be used after it."""
        self.executor.shutdown()

    def _read(self, done: StepResult) -> list[RequestOutput]:
        now, output = time.monotonic(), done.output
        for row, found in output.prompt_logprobs.items():
            request, start = done.batch.requests[row], done.batch.starts[row]
            outputs.fill_prompt_logprobs(request, start, found, self.tokenizer)
        news: dict[int, tuple[RequestGroup, list[News]]] = {}
        for row, request in done.news:
            item = News(request, request.output_token_ids[-1:])
            if request.params.logprobs is not None and output.logprobs is not None:
                outputs.add_logprobs(item, output.logprobs, row, self.tokenizer)
            self._count(request, now)
            group = self._group_of[id(request)]
            news.setdefault(id(group), (group, []))[1].append(item)
        self._forget([r for _, r in done.news if r.finish_reason is not None])
        made = (outputs.make_output(group, items) for group, items in news.values())
        return [o for o in made if o is not None]

    def _forget(self, sequences: list[Request]) -> None:
        """These sequences have ended; a request ends with the last of its sequences."""
        self.stats.finished += sequences
        for sequence in sequences:
            group = self._group_of.pop(id(sequence))
            if group.finished:
                self.requests.pop(group.request_id, None)

    def _count(self, request: Request, now: float) -> None:
        self.stats.generation_tokens += 1
        if request.first_token_time is None or request.last_token_time is None:
            request.first_token_time = now
            self.stats.prompt_tokens += len(request.prompt_token_ids)
            self.stats.ttft.append(now - request.arrival)
        else:
            self.stats.itl.append(now - request.last_token_time)
        request.last_token_time = now

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, which skip_tokenizer_init left out")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is no valid Unicode text: {error}") from error
        return list(self.tokenizer(text).input_ids)

    def _detokenizer(self, ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            ids,
            params.stop_strings,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
        )


def _wrap(seed: int) -> int:
    """As a 64-bit signed integer: the seed after the largest is the smallest."""
    return (seed + 2**63) % 2**64 - 2**63


def _token_ids(prompt: Any) -> list[int]:
    """As plain integers, whatever kind of integers they are. Raises ValueError."""
    if isinstance(prompt, (bytes, dict)) or not isinstance(prompt, Iterable):
        raise ValueError(f"the prompt must be text or token ids, got {reprlib.repr(prompt)}")
    ids = list(prompt)
    if set(map(type, ids)) <= {int}:
        return ids
    for token in ids:
        if not is_integer(token):
            raise ValueError(f"prompt token id {reprlib.repr(token)} is not an integer")
    return [operator.index(token) for token in ids]


def is_integer(value: Any) -> bool:
    """Of any kind, numpy's too."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _eos_token_ids(folder: Path, hf_config: Any, tokenizer: Any) -> list[int]:
    """EOS of generation_config.json (instruct models have several), else of config.json, and the tokenizer's."""
    try:
        found = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):  # none, no JSON, no object
        found = None
    found = found if found is not None else getattr(hf_config, "eos_token_id", None)
    ids = list(found) if isinstance(found, (list, tuple)) else [found]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return sorted({i for i in ids if isinstance(i, int)})


__all__ = ["LLMEngine", "QueueFull", "StepStats"]
