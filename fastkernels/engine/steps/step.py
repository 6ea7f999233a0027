"""The inputs and outputs of one step, exchanged between the scheduler and the ranks.

A running request has a slot: a row of the state on every rank (block table, sampling parameters, last sampled token).
Only changes are sent, so that the cost of a step depends on its batch and not on its context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastkernels.engine.sampling.rows import NewRow, TokenMasks

SAMPLED = -1  # as an input id: the token that this slot sampled last
MADE = SAMPLED - 1  # as an input id: the slot's first draft; the i-th one after it is MADE - i
NO_COPIES = np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True)
class PromptTargets:
    """Request for log-probabilities of prompt tokens: `targets` [n] follow the row's first n queries."""

    row: int
    num_logprobs: int
    targets: np.ndarray


@dataclass(frozen=True)
class Encoding:
    """A medium to encode: see media_cache.MediaItem."""

    kind: str
    digest: bytes
    values: Any
    grid: tuple[int, int, int]
    size: int


@dataclass(frozen=True)
class StepMedia:
    """The media of a step.

    dropped    digests whose features are not needed any more, before those to encode are made
    encodes    media to encode
    spans      (first token of the step, digest, first feature, number) of the tokens with features
    rows [M], positions [3, M]  int64: the tokens up to the last medium of their request, and their positions
    """

    dropped: Sequence[bytes]
    encodes: Sequence[Encoding]
    spans: Sequence[tuple[int, bytes, int, int]]
    rows: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class StepSources:
    """Requests with a source for cross attention that enter slots [N] int64.

    tables [N, blocks of a source] int32; encodes: (features, its row of tables) of the sources to compute
    """

    slots: np.ndarray
    tables: np.ndarray
    encodes: Sequence[tuple[Any, np.ndarray]]


@dataclass(frozen=True)
class NextDrafts:
    """The rows of a step, for a draft model.

    count     drafts to make for each row; 0: the draft model only stores the keys of the step's tokens
    next_ids  [B] int64: the token behind the row's last one, if it is known, or SAMPLED
    room      [B] int32: number of tokens that the row's blocks hold
    forced    [B] int32: drafts to accept, whatever is sampled; None: those that are sampled, too
    unsure    [B] int32: 1 for rows whose accepted drafts of the step before are unknown, and which count all of them;
              None: there are none
    shown     whether the host reads the drafts
    """

    count: int
    next_ids: np.ndarray
    room: np.ndarray
    forced: np.ndarray | None = None
    unsure: np.ndarray | None = None
    shown: bool = True


class Together(NamedTuple):
    """The common part of the steps of data-parallel ranks that share experts, so that all exchange as many tokens.

    tokens, rows  of the rank with the most
    decode        whether all ranks have rows of one query only
    verify        whether all ranks have rows of one token and its drafts only, and some have drafts
    proposes      whether a draft model proposes drafts in any rank, or may in a graph: its chain of passes runs in all
    """

    tokens: int
    rows: int
    decode: bool
    verify: bool = False
    proposes: bool = False


@dataclass(frozen=True)
class StepInput:
    """B rows with T tokens in total. Rows with one query come first; the tokens of a row are contiguous.

    slots          [B] int64
    query_lens     [B] int32: tokens that this step computes
    seq_lens       [B] int32: keys of each row, including this step's
    offsets        [B] int64: tokens generated before this step (index of the noise; for min_tokens); -1: the prompt
                   is not complete, and the sampled token is ignored
    input_ids      [T] int64: token ids, SAMPLED, or drafts that the slots hold: MADE and less
    num_decodes    rows with one query
    block_updates  [U, 3] int32: (row, column, block) to write into the block tables; a slot's row in group g of the
                   layers is g * (max_num_seqs + 1) + slot
    new_rows       slots that get a new request before the step runs
    masked         the step samples only when its Pending gets the TokenMasks
    media          None: no request of the step reads media
    sources        None: no request with a source enters a slot
    drafts         [B] int32: the last tokens of each row that are drafts; a row samples after each of them, and before
                   the first. None: no row has any
    next_drafts    None: no draft model runs
    together       of data-parallel ranks that share experts. None: no rank waits for another
    state_loads, state_saves  [N, 2] int32: slots of recurrent state to copy (from, to) before and after the model runs
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
    masked: bool = False
    state_loads: np.ndarray = field(default_factory=lambda: NO_COPIES)
    state_saves: np.ndarray = field(default_factory=lambda: NO_COPIES)
    media: StepMedia | None = None
    sources: StepSources | None = None
    drafts: np.ndarray | None = None
    next_drafts: NextDrafts | None = None
    together: Together | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at n positions.

    token_ids [n, K + 1] int64 and logprobs [n, K + 1] float32: the token itself, then the K most likely ones, K being
    the largest number that a row requested; ranks [n] int64, from 1.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class StepOutput:
    """token_ids [B] int64, invalid where the prompt is not complete; logprobs if a row requested them; prompt_logprobs
    by row. A row with drafts has one token more for each, row after row.

    next_drafts: waits for the drafts [B, count] int64 of the next step; None: there are none, or they are not shown
    input_ids: [T] int64 of the step, if it had drafts that the host did not know
    """

    token_ids: np.ndarray
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    next_drafts: Callable[[], np.ndarray] | None = None
    input_ids: np.ndarray | None = None


class Pending(Protocol):
    """A step in flight."""

    def result(self) -> StepOutput:
        """Wait for the step. Raises the error that it ended with."""
        ...

    def sample(self, masks: TokenMasks) -> None:
        """Sample the tokens of a masked step. Called once, before the next launch."""
        ...


class Launcher(Protocol):
    """Runs steps in launch order: an Executor (executor.py), or a stand-in in tests."""

    def launch(self, step: StepInput) -> Pending:
        """Start a step without waiting for it. At most two may be in flight."""
        ...


def even(rows: int, tokens: int, longest: int) -> np.ndarray:
    """[rows] int32: `tokens` distributed evenly, longer rows last, none over `longest`."""
    lens = np.full(rows, tokens // rows, dtype=np.int32)
    lens[-(tokens % rows) or rows :] += 1
    return np.minimum(lens, longest)
