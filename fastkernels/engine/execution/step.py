"""One step between the scheduler's process and the ranks that run it: what goes out, and what comes back.

A running request has a slot: a row of the state that every rank keeps (block table, sampling parameters, the token
sampled last). Only what changes is sent, so that a step costs by its batch and not by its context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fastkernels.engine.sampling.sampling_params import SamplingParams

SAMPLED = -1  # as an input id: the token that this slot's last step sampled


@dataclass(frozen=True)
class NewRow:
    """A request enters a slot, at its admission or again after a preemption.

    seed              of its noise, already resolved
    end_token_ids     tokens that end it, banned before params.min_tokens
    prompt_token_ids, output_token_ids  for penalties; empty where the params have none
    """

    slot: int
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int] = frozenset()
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class PromptTargets:
    """Log-probabilities wanted of prompt tokens: of `targets` [n], the tokens after the row's first n queries."""

    row: int
    num_logprobs: int
    targets: np.ndarray


@dataclass(frozen=True)
class StepInput:
    """B rows with T tokens in all, rows of one query first; a row's tokens are contiguous.

    slots          [B] int64
    query_lens     [B] int32: tokens that this step computes
    seq_lens       [B] int32: keys of each row, this step's included
    offsets        [B] int64: tokens generated before this step (counts the noise, and min_tokens); -1: the row's
                   prompt is not done, and what is sampled must not count for its penalties
    input_ids      [T] int64: token ids, or SAMPLED
    num_decodes    rows of one query
    block_updates  [U, 3] int32: (slot, column, block) to be written into the block tables
    new_rows       slots that get another request, before anything else of this step
    """

    slots: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    offsets: np.ndarray
    input_ids: np.ndarray
    num_decodes: int
    block_updates: np.ndarray
    new_rows: Sequence[NewRow] = ()
    prompt_targets: Sequence[PromptTargets] = ()


@dataclass(frozen=True)
class TokenLogprobs:
    """Of n positions. token_ids [n, K + 1] int64 and logprobs [n, K + 1] float32: the token in question first, then the
    K most likely, K the most that a row asked for; ranks [n] int64, from 1."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class StepOutput:
    """token_ids [B] int64 (of a row whose prompt is not done: to be ignored); logprobs where a row asked for them;
    prompt_logprobs by row."""

    token_ids: np.ndarray
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)


class Pending(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the step. Raises what went wrong in it."""
        ...


class Launcher(Protocol):
    """Runs steps in launch order: an Executor (executor.py), or a stand-in in tests."""

    def launch(self, step: StepInput) -> Pending:
        """Start a step without waiting for it. At most two may be in flight."""
        ...


def even(rows: int, tokens: int, longest: int) -> np.ndarray:
    """[rows] int32: `tokens` shared out, the longer rows last, none over `longest`."""
    lens = np.full(rows, tokens // rows, dtype=np.int32)
    lens[-(tokens % rows) or rows :] += 1
    return np.minimum(lens, longest)
