"""The state of a request in the engine, and its outputs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fastkernels.engine.cache.cross_blocks import Source
from fastkernels.engine.cache.media_cache import MediaItem
from fastkernels.engine.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fastkernels.engine.scheduling.detokenizer import Detokenizer
    from fastkernels.engine.scheduling.ngrams import Lookup
from fastkernels.engine.structured.constraint import Constraint


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class BlockTable:
    """The KV blocks of a request in one group of layers; 0 for freed ones, which come first.

    num_sent, num_freed_sent   blocks that the ranks know, and freed ones that they know as such
    """

    blocks: list[int] = field(default_factory=list)
    num_freed: int = 0
    num_sent: int = 0
    num_freed_sent: int = 0

    def clear(self) -> None:
        """Forget all blocks, after they have been freed."""
        self.blocks.clear()
        self.num_freed = self.num_sent = self.num_freed_sent = 0


@dataclass(eq=False, slots=True)
class Request:
    """The engine's state of one sequence. A caller's request has n of them.

    max_tokens           maximum number of generated tokens, within the model's length
    end_token_ids        tokens that end it: EOS (unless ignore_eos) and stop_token_ids
    seed                 seed of its noise: params.seed, or chosen by the engine
    priority             lower goes first, as in vLLM
    index                its index among the caller's n sequences
    rank                 the data-parallel rank that runs it
    constraint           the tokens that it may generate next, if not all
    cache_root           what the names of its blocks begin with: blocks.salt_root of the request's cache_salt
    slot                 its row in the ranks' state while it runs, otherwise -1
    block_tables         KV blocks of its first num_computed_tokens tokens, by group of layers
    block_hashes         names of its first full blocks, computed on demand
    num_computed_tokens  tokens in the cache once the launched steps have ended; reset to 0 by a preemption
    num_inflight         tokens being sampled by launched steps, all drafts included
    num_unsure           drafts of launched steps, which may be rejected
    num_named_blocks     blocks of its tables that the prefix cache knows
    epoch                that of the prefix cache at its last admission; see BlockManager
    next_unseen          number of computed tokens at which windows leave another block behind
    branch               number of tokens that an earlier sequence had, too, where a snapshot of the state is worth its
                         step; 0: none
    snapshot             number of tokens at its last snapshot
    unnamed              (number of tokens, slot) of its snapshots that have no name yet
    decode_snapshot      the name of its last snapshot within generated tokens
    num_sent_chars       characters of its text that the caller has received
    num_cached_tokens    tokens that its first admission found in the prefix cache
    media                of its prompt, in order
    positions            [3, media_end] int64 of its first tokens, with media; shift: see media.MediaPrompt
    source               what its encoder reads; cross_blocks: the blocks of that
    lookup               of drafts; proposed: drafts that a model makes after the last step, or MADE and less
    restores             whether the next step begins with the copy of its recurrent state
    drafts               of the step being scheduled
    num_released         media of which all tokens are computed; num_held: media that it holds, after those
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
    rank: int = field(default=0, kw_only=True)
    constraint: Constraint | None = None
    cache_root: bytes = b""
    media: tuple[MediaItem, ...] = ()
    positions: np.ndarray | None = None
    shift: int = 0
    source: Source | None = None
    cross_blocks: list[int] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    slot: int = -1
    block_tables: list[BlockTable] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_inflight: int = 0
    num_unsure: int = 0
    num_named_blocks: int = 0
    epoch: int = 0
    next_unseen: int = sys.maxsize
    branch: int = 0
    snapshot: int = 0
    unnamed: list[tuple[int, int]] = field(default_factory=list)
    decode_snapshot: bytes | None = None
    lookup: Lookup | None = None
    proposed: list[int] = field(default_factory=list)
    restores: bool = False
    drafts: list[int] = field(default_factory=list)
    num_released: int = 0
    num_held: int = 0
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
        """Tokens of the sequence, including those being sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_inflight

    @property
    def media_end(self) -> int:
        """The number of tokens up to the end of the last medium."""
        return self.media[-1].end if self.media else 0

    def media_key(self, start: int, stop: int) -> bytes:
        """Digests and places of the media in tokens start .. stop - 1, for the names of blocks."""
        return b"".join(
            m.digest + (m.start - start).to_bytes(8, "little", signed=True)
            for m in self.media if m.start < stop and m.end > start
        )  # fmt: skip

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the prompt must be computed for its log-probabilities, without the prefix cache."""
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
        """Set the reason of its end. The scheduler changes its status when it removes the request."""
        self.finish_reason, self.stop_reason = reason, stop_reason


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of a token from the raw logits; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs: TypeAlias = "list[dict[int, Logprob]]"  # one dict per generated token, with that token first
PromptLogprobs: TypeAlias = "list[dict[int, Logprob] | None]"  # one per prompt token; None for the first


@dataclass
class CompletionOutput:
    """One output of a request. finish_reason: 'stop', 'length', 'abort', or None while it runs.

    text, token_ids and logprobs hold everything so far, or with RequestOutputKind.DELTA what is new since the last
    output. num_tokens always counts all generated tokens.
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
    """The state of a request after a step. With DELTA it has only those of its n outputs with something new.

    Before the end, text that may be the start of a stop string or of a character is held back. prompt_logprobs are
    included from the first output on.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
