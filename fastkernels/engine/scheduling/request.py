"""One request on its way through the engine, and what the caller gets back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from fastkernels.engine.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fastkernels.engine.scheduling.detokenizer import Detokenizer


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """The engine's state of one sequence. A caller's request with n > 1 is n of these.

    max_tokens           tokens to generate at most, the model's length considered
    end_token_ids        tokens that end it: EOS (unless ignore_eos) and stop_token_ids
    seed                 of its noise: params.seed, or drawn by the engine
    priority             lower goes first, as in vLLM
    index                which of the caller's n sequences
    slot                 its row in the ranks' state while it runs, -1 otherwise
    block_table          KV blocks that hold its first num_computed_tokens tokens
    block_hashes         names of its first full blocks, as far as they have been needed
    num_computed_tokens  tokens whose keys and values are in the cache when the launched steps are done;
                         preemption sets it to 0
    num_inflight         tokens that launched steps sample and that are not known yet, at most 2
    num_sent_blocks      blocks of the table that the ranks know
    num_named_blocks     blocks of the table that the prefix cache was told of
    num_sent_chars       characters of its text that the caller has
    num_cached_tokens    tokens that its first admission found in the prefix cache
    arrival, scheduled_time, first_token_time, last_token_time  seconds of time.monotonic()
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    detokenizer: Detokenizer | None = None
    seed: int = 0
    priority: int = 0
    index: int = 0
    arrival: float = field(default_factory=time.monotonic)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    slot: int = -1
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_inflight: int = 0
    num_sent_blocks: int = 0
    num_named_blocks: int = 0
    num_sent_chars: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those that launched steps sample included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_inflight

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether its prompt's log-probabilities are wanted and not all there: its prompt must be computed, then."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens start .. stop - 1 of the sequence."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Say why it ends; its status changes when the scheduler lets it go."""
        self.finish_reason, self.stop_reason = reason, stop_reason


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of a token by the model's own logits; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs: TypeAlias = "list[dict[int, Logprob]]"  # one dict a generated token, that token first
PromptLogprobs: TypeAlias = "list[dict[int, Logprob] | None]"  # one a prompt token; the first has none


@dataclass
class CompletionOutput:
    """One output of a request. finish_reason: 'stop', 'length', 'abort', or None while it runs.

    text, token_ids, logprobs are all so far, or with RequestOutputKind.DELTA what is new since the last output.
    num_tokens counts all generated tokens in both.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0


@dataclass
class RequestOutput:
    """The state of a request after a step. With DELTA it has those of its n outputs that have something new.

    A finished output has all its text; before that, text that may be the beginning of a stop string, or of a
    character, is held back. prompt_logprobs are there from a request's first output on.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
