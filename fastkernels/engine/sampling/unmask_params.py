"""Sampling parameters of diffusion language models, which start from masks and choose tokens in any order."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from fastkernels.engine.sampling.sampling_params import SamplingParams

REMASKING = ("low_confidence", "random")
BLOCK_CACHES = ("none", "prefix", "dual")
MAX_TOKENS = 128  # of an answer without max_tokens, as in LLaDA's own code
BLOCK = 32  # the most tokens of a block without block_length
MAX_GUIDANCE = 100.0


@dataclass
class UnmaskParams(SamplingParams):
    """SamplingParams of a diffusion language model. An answer has max_tokens masks; blocks of them are filled in from
    left to right, and the masks of a block in the order of confidence. Raises ValueError.

    temperature   0 by default: the most likely token. Otherwise tokens are drawn from softmax(logits / temperature)
    max_tokens    None: 128, or as many as fit
    block_length  tokens of a block, a divisor of max_tokens; None: the largest one up to 32
    steps         steps of the whole answer, a multiple of its blocks: each chooses as many tokens as the others of its
                  block, the first ones one more where that is uneven; None: max_tokens, which is one token a step
    threshold     in (0, 1]: instead of `steps`, a step chooses all tokens whose probability is at least this, and the
                  most likely one (Fast-dLLM, arXiv 2505.22618)
    remasking     'low_confidence' chooses the tokens with the largest probabilities, 'random' any
    cfg_scale     [0, 100], classifier-free guidance: logits + cfg_scale * (logits - those with a masked prompt)
    block_cache   keys and values that the steps of a block after its first one do not compute: 'none' of them (exact),
                  those before the block ('prefix'), or all but the block's ('dual') (Fast-dLLM)

    Fields of SamplingParams that assume an order of tokens, or log-probabilities, are refused by name.
    """

    temperature: float = 0.0
    block_length: int | None = None
    steps: int | None = None
    threshold: float | None = None
    remasking: str = "low_confidence"
    cfg_scale: float = 0.0
    block_cache: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_length", "steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {reprlib.repr(value)}")
        _number("threshold", self.threshold, 1.0, open_low=True)
        _number("cfg_scale", self.cfg_scale, MAX_GUIDANCE)
        for name, known in (("remasking", REMASKING), ("block_cache", BLOCK_CACHES)):
            if getattr(self, name) not in known:
                choices = ", ".join(map(repr, known))
                raise ValueError(f"{name} must be one of {choices}, got {reprlib.repr(getattr(self, name))}")
        if self.threshold is not None and self.steps is not None:
            raise ValueError(
                f"steps cannot be set with threshold, which decides the number of steps: got steps={self.steps}"
            )
        if self.threshold is not None and self.remasking != "low_confidence":
            raise ValueError(f"threshold needs remasking='low_confidence', got {self.remasking!r}")
        if self.cfg_scale and self.block_cache != "none":
            raise ValueError(f"cfg_scale needs block_cache='none', got {self.block_cache!r}")
        self._refuse()

    def _refuse(self) -> None:
        """Raise ValueError for a field that needs tokens to be chosen from left to right."""
        for field in fields(SamplingParams):
            if field.name not in NOT_HERE:
                continue
            value = getattr(self, field.name)
            default = field.default if field.default is not MISSING else None
            if value != default and not _nothing(value) and not (field.name == "top_k" and value == -1):
                allowed = "leave it out" if default is None else f"only {default!r}"
                raise ValueError(
                    f"{field.name} is not supported for a diffusion language model, {allowed}: got"
                    f" {reprlib.repr(value)}"
                )

    def plan(self, max_tokens: int) -> Plan:
        """How an answer of max_tokens is made. Raises ValueError."""
        length = self.block_length or max(n for n in range(1, BLOCK + 1) if max_tokens % n == 0)
        if max_tokens % length:
            raise ValueError(
                f"block_length must be a divisor of max_tokens={max_tokens}: {_divisors(max_tokens)}; got {length}"
            )
        blocks = max_tokens // length
        steps = self.steps or max_tokens
        if steps % blocks:
            raise ValueError(
                f"steps must be a multiple of the {blocks} blocks (max_tokens={max_tokens} by block_length={length}),"
                f" got {steps}"
            )
        if self.threshold is not None:
            return Plan(length, ())
        each, rest = divmod(length, steps // blocks)
        useful = min(steps // blocks, length)  # a step without a token changes nothing
        return Plan(length, tuple(each + (i < rest) for i in range(useful)))


@dataclass(frozen=True)
class Plan:
    """block_length: tokens of a block. counts: tokens that each of its steps chooses; empty: a threshold decides."""

    block_length: int
    counts: Sequence[int]


OWN = tuple(
    f.name for f in fields(UnmaskParams) if f.name not in {own.name for own in fields(SamplingParams)}
)
NOT_HERE = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k", "min_p", "min_tokens", "logprobs",
    "prompt_logprobs", "logit_bias", "bad_words", "allowed_token_ids", "structured_outputs",
)  # fmt: skip


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def _number(name: str, value: Any, high: float, open_low: bool = False) -> None:
    if value is None and open_low:
        return
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not (value > 0 if open_low else value >= 0) or not value <= high:
        raise ValueError(
            f"{name} must be a number in {'(' if open_low else '['}0, {high:g}], got {reprlib.repr(value)}"
        )


def _divisors(number: int) -> str:
    found = [str(n) for n in range(1, number + 1) if number % n == 0]
    return ", ".join(found) if len(found) <= 12 else ", ".join([*found[:11], "..."])
