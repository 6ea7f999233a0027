"""A simulated executor whose KV cache holds tokens. It reads sequences back through the block tables, so that a block
that is shared while written, freed too early or wrongly named gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastkernels.engine.steps.step import SAMPLED, StepInput, StepOutput

VOCAB = 50


def next_token(token_ids: Sequence[int]) -> int:
    """The simulated model's next token."""
    value = 7
    for token in token_ids:
        value = (value * 31 + int(token) + 1) % 1000003
    return value % VOCAB


def continuation(prompt: Sequence[int], num: int) -> list[int]:
    """The next `num` tokens after a prompt."""
    found = list(prompt)
    for _ in range(num):
        found.append(next_token(found))
    return found[len(prompt) :]


@dataclass
class Done:
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class CacheModel:
    """The executor of the simulated model.

    version  of its weights, which a test may change
    oldest   by group and place in the cache: the oldest version that what is stored there depends on
    states   by slot of recurrent state: the tokens of a sequence, and the oldest version; None without such layers
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int,
        windows: Sequence[int] = (), paged: bool = True, state_slots: int = 0,
    ):  # fmt: skip
        self.paged = paged
        self.states: list[tuple[list[int], int]] | None = [([], 0)] * state_slots or None
        self.block_size, self.budget, self.windows = block_size, max_num_batched_tokens, windows
        groups = 1 + len(windows)
        self.caches = np.full((groups, num_blocks * block_size), -1, np.int64)
        self.version, self.oldest = 0, np.zeros_like(self.caches)
        self.tables = np.zeros((groups, max_num_seqs + 1, num_blocks), np.int64)
        self.cache = self.caches[0]
        self.last = np.full(max_num_seqs, -1, np.int64)
        self.computed_tokens = 0

    def launch(self, step: StepInput) -> Done:
        assert 0 < step.query_lens.sum() == len(step.input_ids) <= self.budget
        assert len(set(step.slots.tolist())) == len(step.slots), "a slot has two rows"
        assert (step.query_lens[: step.num_decodes] == 1).all() and (
            step.query_lens[step.num_decodes :] > 1
        ).all()
        for row in step.new_rows:
            self.tables[:, row.slot] = 0
        for row, column, block in step.block_updates.tolist():
            group, slot = divmod(row, self.tables.shape[1])
            assert block > 0 or group > 0, "only a window leaves blocks behind"
            self.tables[group, slot, column] = block
        ids = self._input_ids(step)
        if self.states is not None:
            self._scan(step, ids, self.states)
        if self.paged:
            self._store(step, ids)
        found = [self._sample(slot, length) for slot, length in zip(step.slots, step.seq_lens, strict=True)]
        self.last[step.slots] = found
        self.computed_tokens += len(ids)
        return Done(StepOutput(np.array(found)))

    def _scan(self, step: StepInput, ids: np.ndarray, states: list[tuple[list[int], int]]) -> None:
        """Add the step's tokens to the states of its rows, between the copies of slots."""
        for source, target in step.state_loads.tolist():
            states[target] = states[source]
        ends = step.query_lens.cumsum()
        for slot, count, length, end in zip(step.slots, step.query_lens, step.seq_lens, ends, strict=True):
            before, oldest = states[slot + 1] if length > count else ([], self.version)
            assert len(before) == length - count, "the state is of another sequence"
            states[slot + 1] = [*before, *ids[end - count : end].tolist()], min(oldest, self.version)
        for source, target in step.state_saves.tolist():
            states[target] = states[source]

    def _input_ids(self, step: StepInput) -> np.ndarray:
        rows = np.repeat(step.slots, step.query_lens)
        return np.where(step.input_ids == SAMPLED, self.last[rows], step.input_ids)

    def _store(self, step: StepInput, ids: np.ndarray) -> None:
        for group in range(len(self.caches)):
            self._store_group(group, step, ids)
        self._date(step)
        for group, window in enumerate(self.windows, 1):
            self._check_window(group, window, step)

    def _store_group(self, group: int, step: StepInput, ids: np.ndarray) -> None:
        written: dict[int, int] = {}
        at = 0
        for slot, count, length in zip(step.slots, step.query_lens, step.seq_lens, strict=True):
            for position in range(length - count, length):
                block = self.tables[group, slot, position // self.block_size]
                assert block > 0, "a token without a block"
                place = int(block) * self.block_size + position % self.block_size
                assert place not in written, "two rows write the same place"
                written[place] = self.caches[group, place] = ids[at]
                at += 1

    def _date(self, step: StepInput) -> None:
        """Set `oldest` of the step's tokens. Those of one row may continue the blocks of another one."""
        new = [
            (position, slot)
            for slot, count, length in zip(step.slots, step.query_lens, step.seq_lens, strict=True)
            for position in range(length - count, length)
        ]
        for position, slot in sorted(new):
            before = self.oldest[0, self._place(0, slot, position - 1)] if position else self.version
            for group in range(len(self.caches)):
                self.oldest[group, self._place(group, slot, position)] = min(self.version, before)

    def _place(self, group: int, slot: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return int(self.tables[group, slot, block]) * self.block_size + offset

    def _check_window(self, group: int, window: int, step: StepInput) -> None:
        """The group has all tokens that the step's queries see."""
        for slot, count, length in zip(step.slots, step.query_lens, step.seq_lens, strict=True):
            seen = np.arange(max(0, length - count - window + 1), length)
            assert (self._tokens(group, slot, seen) == self._tokens(0, slot, seen)).all()

    def _tokens(self, group: int, slot: int, positions: np.ndarray) -> np.ndarray:
        blocks = self.tables[group, slot, positions // self.block_size]
        return self.caches[group, blocks * self.block_size + positions % self.block_size]

    def _sample(self, slot: int, length: int) -> int:
        state = None if self.states is None else self.states[slot + 1][0]
        if not self.paged:
            assert state is not None
            return next_token(state)
        tokens = self._tokens(0, slot, np.arange(length))
        assert state is None or state == tokens.tolist(), "the state is of other tokens"
        return next_token(tokens)
