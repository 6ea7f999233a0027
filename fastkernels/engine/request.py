"""One request on its way through the engine, and what the caller gets back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from .detokenizer import Detokenizer


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """The engine's state of one request.

    max_tokens           tokens to generate at most, the model's length considered
    end_token_ids        tokens that end it: EOS (unless ignore_eos) and stop_token_ids
    block_table          KV blocks that hold its first num_computed_tokens tokens
    num_computed_tokens  tokens whose keys and values are in the cache; preemption sets it to 0
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    detokenizer: Detokenizer | None = None
    generator: torch.Generator | None = None
    output_token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    arrival: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that the next step computes."""
        return self.num_tokens - self.num_computed_tokens

    def new_tokens(self) -> list[int]:
        """The tokens that the next step computes: [num_new_tokens]."""
        start, prompt = self.num_computed_tokens, len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt :]
        return self.prompt_token_ids[start:] + self.output_token_ids

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason, self.stop_reason = reason, stop_reason


@dataclass
class CompletionOutput:
    """One output of a request. finish_reason: 'stop', 'length', 'abort', or None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """The state of a request after a step: everything so far, and beside it what is new since the last output.

    A finished request's last output has all its text; before that, text that may be the beginning of a stop
    string, or of a character, is held back.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    new_text: str = ""
    new_token_ids: list[int] = field(default_factory=list)
