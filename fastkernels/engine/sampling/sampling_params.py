"""Sampling parameters and stop conditions of a request. Names, meanings and ranges are vLLM's."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fastkernels.engine.sampling.repetition import RepetitionAware
from fastkernels.engine.structured.params import StructuredOutputsParams
from fastkernels.engine.structured.timestamps import TimestampRules

MAX_N = 16384
MAX_LOGPROBS = 20  # an engine's default
MAX_STOP_STRINGS = 128
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1000
TRUNCATION_SIDES = ("left", "right")
MAX_TEMPERATURE = 1e6  # practically uniform; float32 logits stay far from overflow
MIN_TEMPERATURE = 0.01  # smaller positive temperatures are raised to it, as in vLLM


class RequestOutputKind(Enum):
    """CUMULATIVE: each output holds everything so far. DELTA: what is new. FINAL_ONLY: one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """Per-request sampling parameters. Log-probabilities are of the raw logits, before temperature, bias, penalties and
    filters. Raises ValueError, naming the field, the value and the limit, for values out of range.

    n                   outputs for the prompt, 1 to 16384; with temperature 0 they are equal
    presence_penalty    [-2, 2], subtracted from the logits of generated tokens
    frequency_penalty   [-2, 2], subtracted once for each time the token was generated
    repetition_penalty  [1e-6, 1e6]; divides positive and multiplies negative logits of tokens in prompt and output
    temperature  [0, 1e6]; 0: greedy (top_p, top_k, min_p and seed have no effect); values below 0.01 are raised to 0.01
    top_p        (0, 1]: sample from the smallest set of most likely tokens whose probabilities sum to at least top_p
    top_k        sample from the k most likely tokens; 0 or -1: all
    min_p        [0, 1]: sample from tokens with at least min_p times the probability of the most likely one
    seed         a signed 64-bit integer: the same seed gives the same noise in any batch; output i of n uses seed + i;
                 None or -1: the engine chooses one
    stop         strings that end the output; included in it only with include_stop_str_in_output
    stop_token_ids  tokens that end the output, as EOS does
    ignore_eos   continue after EOS
    max_tokens   maximum number of generated tokens; None: up to the model's length
    min_tokens   number of tokens before which EOS and stop tokens are banned
    logprobs     number of most likely tokens with log-probabilities, plus the sampled one; -1: all; None: none
    prompt_logprobs  the same for the tokens of the prompt
    logit_bias   {token id: value added to its logit, in [-100, 100]}
    bad_words    texts that the output must not contain, as the tokenizer splits them, alone and after a space
    allowed_token_ids  the only tokens that may be generated, EOS included
    truncate_prompt_tokens  the most tokens of the prompt that are used; -1: as many as leave room for one token
    truncation_side  'right' uses the first ones, 'left' the last ones; None: as the tokenizer says
    structured_outputs  a StructuredOutputsParams: the output is JSON of a schema, a choice, ...
    timestamps   a TimestampRules: the output is a transcription with timestamps
    repetition_aware  a RepetitionAware: how tokens of speech are drawn
    detokenize   False: no text, and no stop strings
    skip_special_tokens  leave tokens such as EOS out of the text
    output_kind  content of each output; LLM.generate always returns the final one
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    timestamps: TimestampRules | None = None
    repetition_aware: RepetitionAware | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, -1, note=" (0 or -1: all tokens)")
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1, note=" (a 64-bit signed integer)")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, note=" (-1: all tokens)")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {reprlib.repr(getattr(self, name))}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {reprlib.repr(self.output_kind)}")
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise ValueError(
                "structured_outputs must be StructuredOutputsParams, got"
                f" {reprlib.repr(self.structured_outputs)}"
            )
        if not isinstance(self.timestamps, (TimestampRules, type(None))):
            raise ValueError(f"timestamps must be TimestampRules, got {reprlib.repr(self.timestamps)}")
        if not isinstance(self.repetition_aware, (RepetitionAware, type(None))):
            raise ValueError(
                f"repetition_aware must be a RepetitionAware, got {reprlib.repr(self.repetition_aware)}"
            )
        self._check_stop()
        self._check_logit_bias()
        self._check_tokens()
        self._normalize()

    def _check_stop(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else _list("stop", self.stop, MAX_STOP_STRINGS)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold strings that are not empty, got {reprlib.repr(text)}")
            if len(text) > MAX_STOP_LENGTH:
                raise ValueError(
                    f"stop: a string of {len(text)} characters, at most {MAX_STOP_LENGTH} are allowed"
                )
        if stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, got detokenize=False")
        self.stop = stop
        tokens = _list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        for token in tokens:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        self.stop_token_ids = list(dict.fromkeys(tokens))

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias must map token ids to numbers, got {type(self.logit_bias).__name__}"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} tokens, at most {MAX_LOGIT_BIAS} are allowed"
            )
        biases = {}
        for key, bias in self.logit_bias.items():
            token = int(key) if _is_digits(key) else key
            _integer("logit_bias token id", token, 0, 2**31 - 1)
            _number(f"logit_bias of token {token}", bias, -100, 100)
            biases[token] = float(bias)
        self.logit_bias = biases or None

    def _check_tokens(self) -> None:
        self.bad_words = list(dict.fromkeys(_list("bad_words", self.bad_words, MAX_BAD_WORDS)))
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise ValueError(f"bad_words must hold words that are not empty, got {reprlib.repr(word)}")
        if self.allowed_token_ids is not None:
            allowed = _list("allowed_token_ids", self.allowed_token_ids, 2**31)
            if not allowed:
                raise ValueError("allowed_token_ids must not be empty: no token could be generated")
            for token in allowed:
                _integer("allowed_token_ids", token, 0, 2**31 - 1)
            self.allowed_token_ids = list(dict.fromkeys(allowed))
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens must be -1 or at least 1, got 0")
        if self.truncation_side not in (None, *TRUNCATION_SIDES):
            raise ValueError(
                f"truncation_side must be 'left' or 'right', got {reprlib.repr(self.truncation_side)}"
            )

    def _normalize(self) -> None:
        if self.seed == -1:
            self.seed = None
        if 0 < self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def verify(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Check what depends on the engine. Raises ValueError.

        vocab_size    token ids must be below it
        max_logprobs  the most logprobs and prompt_logprobs; -1: no limit
        """
        limit = vocab_size if max_logprobs == -1 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            wanted = vocab_size if wanted == -1 else wanted
            if wanted is not None and wanted > limit:
                raise ValueError(
                    f"{name} must be at most {limit} (max_logprobs of this engine), got {wanted}"
                )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise ValueError(f"{name}: token id {token} is not in the vocabulary of {vocab_size}")
        if self.timestamps is not None and self.timestamps.vocab_size != vocab_size:
            raise ValueError(
                f"timestamps are of a vocabulary of {self.timestamps.vocab_size} tokens, and the model has {vocab_size}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_penalties(self) -> bool:
        """Whether the logits are penalized for the tokens that came before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """Whether a token's distribution depends on which tokens came before, other than through the model."""
        return self.needs_penalties or self.repetition_aware is not None

    @property
    def stop_strings(self) -> Sequence[str]:
        return self.stop or ()


def _is_digits(key: Any) -> bool:
    """Whether the key is a token id written as a string, as in JSON objects."""
    return isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdigit()


def _integer(name: str, value: Any, low: int, high: int | None = None, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {reprlib.repr(value)}")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {span}{note}, got {reprlib.repr(value)}")


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {reprlib.repr(value)}")
    if not (low < value if open_low else low <= value) or not value <= high:  # written so that NaN fails
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise ValueError(f"{name} must be in {bounds}, got {reprlib.repr(value)}")


def _list(name: str, value: Any, limit: int) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
        raise ValueError(f"{name} must be a list, got {reprlib.repr(value)}")
    if len(value) > limit:
        raise ValueError(f"{name} has {len(value)} entries, at most {limit} are allowed")
    return list(value)
