"""Inputs and outputs of the sampler: slots, the plan of a batch, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fastkernels.engine.sampling.repetition import RepetitionAware
from fastkernels.engine.sampling.rows import NewRow


@dataclass(frozen=True)
class SamplePlan:
    """The features that the rows of a batch use, known on the host, so that the device computes nothing else.

    all_greedy    all rows are greedy: tokens do not depend on seeds and offsets
    first_time    the first of the model's timestamps, if rows have rules for them; 0: none has
    repetition    (rules, their number) of rows with repetition-aware sampling
    num_logprobs  the largest number of most likely tokens that a row requests; 0: only the sampled token;
                  -1: no log-probabilities
    """

    all_greedy: bool
    any_penalties: bool = False
    any_bias: bool = False
    any_min_tokens: bool = False
    masked: bool = False
    first_time: int = 0
    num_logprobs: int = -1
    repetition: tuple[tuple[RepetitionAware, int], ...] = ()

    @property
    def from_raw(self) -> bool:
        """Whether all rows sample from the raw logits."""
        changed = self.any_penalties or self.any_bias or self.any_min_tokens or self.masked
        return not changed and not self.first_time and not self.repetition


_GREEDY, _DRAWN = SamplePlan(True), SamplePlan(False)


class LogprobsTensors(NamedTuple):
    """Log-probabilities of R rows, before temperature, bias, penalties and filters (vLLM's raw_logprobs).

    token_ids  [R, K + 1] int64: the sampled (or prompt) token, then the K most likely, most likely first
    logprobs   [R, K + 1] float32
    ranks      [R] int64: number of tokens at least as likely as the first one, itself included
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


class SlotFlags:
    """The slots' parameters on the host, to plan a batch in O(B). Slot `num_slots - 1` is the dummy."""

    def __init__(self, num_slots: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.greedy = np.ones(num_slots, dtype=bool)
        self.penalties = np.zeros(num_slots, dtype=bool)
        self.bias = np.zeros(num_slots, dtype=bool)
        self.min_tokens = np.zeros(num_slots, dtype=np.int64)
        self.times = np.zeros(num_slots, dtype=np.int64)
        self.logprobs = np.full(num_slots, -1, dtype=np.int64)
        self.rules: list[RepetitionAware] = []  # that any request has had
        self.rule = np.full(num_slots, -1, dtype=np.int64)
        self.special = np.zeros(num_slots, dtype=bool)  # any feature other than greedy is in use

    def set(self, row: NewRow) -> None:
        slot, params = row.slot, row.params
        self.greedy[slot] = params.greedy
        self.penalties[slot] = params.needs_penalties
        self.bias[slot] = bool(params.logit_bias)
        self.min_tokens[slot] = params.min_tokens if row.end_token_ids else 0
        self.times[slot] = 0 if params.timestamps is None else params.timestamps.first
        rules = params.repetition_aware
        if rules is not None and rules not in self.rules:
            self.rules.append(rules)
        self.rule[slot] = -1 if rules is None else self.rules.index(rules)
        wanted = params.logprobs
        self.logprobs[slot] = -1 if wanted is None else self.vocab_size if wanted == -1 else wanted
        self.special[slot] = (
            self.penalties[slot] or self.bias[slot] or self.min_tokens[slot] > 0 or self.times[slot]
            or wanted is not None or rules is not None
        )  # fmt: skip

    def plan(self, slots: np.ndarray, offsets: np.ndarray, masked: bool = False) -> SamplePlan:
        """slots, offsets: [B] integers, as in Sampler.__call__."""
        greedy = bool(self.greedy[slots].all())
        if not masked and not self.special[slots].any():
            return _GREEDY if greedy else _DRAWN
        return SamplePlan(
            greedy,
            bool(self.penalties[slots].any()),
            bool(self.bias[slots].any()),
            bool((offsets < self.min_tokens[slots]).any()),
            masked,
            int(self.times[slots].max(initial=0)),
            int(self.logprobs[slots].max(initial=-1)),
            tuple((self.rules[i], int(i)) for i in np.unique(self.rule[slots]) if i >= 0),
        )
