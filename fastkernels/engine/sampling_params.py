"""How one request is sampled and when it stops. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0  # every output has all so far
    DELTA = 1  # every output has what is new
    FINAL_ONLY = 2  # one output, at the end


@dataclass
class SamplingParams:
    """Per-request sampling. Raises ValueError for a value out of range.

    temperature  0: greedy (the most likely token; top_p, top_k and seed are not used)
    top_p        sample from the smallest set of most likely tokens whose probabilities sum to at least top_p
    top_k        sample from the k most likely tokens; 0 or -1: all
    seed         the same seed gives the same tokens whatever else is in the batch; None: the engine's stream
    max_tokens   tokens to generate at most; None: up to the model's length
    min_tokens   neither EOS nor a stop token before so many tokens
    stop         strings that end the output; not part of it unless include_stop_str_in_output
    stop_token_ids  tokens that end the output, as EOS does
    ignore_eos   go on after EOS
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    n: int = 1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be at least 1, or 0 or -1 for all tokens, got {self.top_k}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must fit into 64 bits, got {self.seed}")
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(self.stop or ())
        if not all(self.stop):
            raise ValueError("stop must not contain an empty string")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        self.stop_token_ids = list(self.stop_token_ids or ())

    def check(self, vocab_size: int, max_logprobs: int) -> None:
        """Raises ValueError for what a model with this vocabulary, or this engine, cannot serve."""
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise ValueError(f"{name} {value} is more than this engine's max_logprobs {max_logprobs}")

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> Sequence[str]:
        return self.stop or ()
