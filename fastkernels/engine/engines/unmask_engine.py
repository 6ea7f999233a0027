"""The engine of diffusion language models: blocks of masks that several steps fill in. See LLMEngine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fastkernels.engine.cache.blocks import BlockManager
from fastkernels.engine.engines.llm_engine import LLMEngine, eos_token_ids
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.sampling.unmask_params import MAX_TOKENS, UnmaskParams
from fastkernels.engine.scheduling import outputs, unmasking
from fastkernels.engine.scheduling.outputs import News, RequestGroup, append_token
from fastkernels.engine.scheduling.request import Request, RequestOutput
from fastkernels.engine.scheduling.unmasking import UnmaskScheduler
from fastkernels.engine.structured.grammars import Grammars


class UnmaskEngine(LLMEngine):
    """See Engine. A request's tokens are those that it gets alone, whatever other requests a step has.

    Outputs come with the end of a block. A block with an end token is the last one.
    """

    kind = "Unmask"
    params: ClassVar[type[SamplingParams]] = UnmaskParams
    scheduler: UnmaskScheduler  # type: ignore[assignment]

    def _start(self) -> None:
        config, limits = self.config, self.executor.limits
        self.eos_token_ids = eos_token_ids(self.folder, self.hf_config, self.tokenizer)
        self.grammars = Grammars(
            self.tokenizer, self.hf_config.vocab_size, self.eos_token_ids, config.json_any_whitespace
        )
        self.blocks = BlockManager(limits.num_blocks, config.block_size, False)
        self.media = self.audio = None
        self.scheduler = UnmaskScheduler(
            self.blocks, self.hf_config.mask_token_id, config.max_num_seqs, limits.max_num_batched_tokens,
            config.max_waiting,
        )  # fmt: skip
        self.core = UnmaskCore(self.scheduler, self.executor, config.block_size)  # type: ignore[assignment]
        self._begin()

    def make_request(
        self, request_id: str, prompt: Any, params: SamplingParams, priority: int = 0, cache_salt: str | None = None
    ) -> RequestGroup:  # fmt: skip
        """See LLMEngine. SamplingParams stand for UnmaskParams with these values. cache_salt has no effect."""
        if isinstance(params, SamplingParams) and not isinstance(params, UnmaskParams):
            params = UnmaskParams(**{f.name: getattr(params, f.name) for f in fields(SamplingParams)})
        made = super().make_request(request_id, prompt, params, priority, cache_salt)
        mask = self.hf_config.mask_token_id
        if mask in made.prompt_token_ids:
            at = made.prompt_token_ids.index(mask)
            raise ValueError(
                f"the prompt has the mask token {mask} at position {at}: the answer is made of these"
            )
        max_tokens = made.sequences[0].max_tokens
        params.plan(max_tokens)
        self.scheduler.check_request(len(made.prompt_token_ids) + max_tokens, params)
        return made

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, UnmaskParams):
            raise ValueError(f"a diffusion language model takes UnmaskParams, got {type(params).__name__}")

    def _max_tokens(self, params: SamplingParams, room: int) -> int:
        """All tokens of an answer exist from its first step on, so none can be left out later."""
        if params.max_tokens is not None:
            if params.max_tokens > room:
                raise ValueError(
                    f"max_tokens is {params.max_tokens}, and the context has room for {room} tokens after the prompt:"
                    f" its maximum length is {self.max_model_len} tokens"
                )
            return params.max_tokens
        assert isinstance(params, UnmaskParams)
        most, length = min(MAX_TOKENS, room), params.block_length or 1
        if length > most:
            raise ValueError(f"block_length must be at most {most}, the tokens of the answer, got {length}")
        return most - most % length

    def _read(self, done: UnmaskResult) -> list[RequestOutput]:  # type: ignore[override]
        now = time.monotonic()
        news: dict[int, tuple[RequestGroup, list[News]]] = {}
        for request, tokens in done.news:
            self._count(request, now, len(tokens))
            group = self._group_of[id(request)]
            news.setdefault(id(group), (group, []))[1].append(News(request, tokens))
        self._forget([request for request, _ in done.news if request.finish_reason is not None])
        made = (outputs.make_output(group, items) for group, items in news.values())
        return [o for o in made if o is not None]


@dataclass(frozen=True)
class UnmaskResult:
    """A finished step. news: (request, its new tokens) of those with a finished block."""

    news: list[tuple[Request, list[int]]]


class UnmaskCore:
    """The step loop; see EngineCore. The next step depends on what this one chooses: one is in flight at a time."""

    def __init__(self, scheduler: UnmaskScheduler, executor: Any, block_size: int):
        self.scheduler, self.executor, self.block_size = scheduler, executor, block_size

    @property
    def busy(self) -> bool:
        return len(self.scheduler) > 0

    def step(self) -> UnmaskResult | None:
        """Run a step. None if there is nothing to run."""
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        output = self.executor.launch(unmasking.make_step(batch, self.block_size)).result()
        news = []
        for request, block in unmasking.fill(batch, output):
            before = len(request.output_token_ids)
            for token in block:
                append_token(request, token)
                if request.finish_reason is not None:
                    break
            news.append((request, request.output_token_ids[before:]))
        self.scheduler.remove([r for r, _ in news if r.finish_reason is not None])
        return UnmaskResult(news)

    def results(self) -> list[UnmaskResult]:
        """The result of a step as a list; see EngineCore."""
        done = self.step()
        return [] if done is None else [done]

    def end(self, requests: Iterable[Request]) -> None:
        """Remove unfinished requests."""
        self.scheduler.remove(requests)

    def reset(self) -> None:
        """Remove all requests, after a failed step."""
        self.scheduler.remove_all()
