"""A step's inputs on their way to the device: page-locked staging, one packed copy, and the block tables.

All that follows from a StepInput (positions, slots of the KV cache) is computed in numpy from a mirror of the block
tables. Nothing here waits for the device, and no Python loop runs over rows or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastkernels.engine.execution.step import StepInput


@dataclass(frozen=True)
class Inputs:
    """A step padded to T tokens and B rows. Tensors are views of one packed buffer, on the device.

    input_ids, positions, slot_mapping, token_slots  [T] int64: token_slots is the slot of each token's row
    slots, offsets, last_index                       [B] int64: last_index is where each row's last token is
    sample_slots                                     [B] int64: slots, and the dummy slot where nothing is sampled
    seq_lens [B], cu_seqlens_q [B + 1]               int32
    turn                                             [1] int32: the row of InputBatch.sampled for its tokens
    num_rows, num_decodes                            host: rows that are not padding, and those of one query
    max_seqlen_q, max_seqlen_k, max_decode_seqlen_k  host: no tensor needs to be read
    host_query_lens, host_seq_lens                   [B] int32 numpy, padding included
    host_turn                                        `turn`
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    token_slots: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    last_index: torch.Tensor
    sample_slots: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    turn: torch.Tensor
    num_rows: int
    num_decodes: int
    max_seqlen_q: int
    max_seqlen_k: int
    max_decode_seqlen_k: int
    host_query_lens: np.ndarray
    host_seq_lens: np.ndarray
    host_turn: int

    @property
    def decode_only(self) -> bool:
        return self.max_seqlen_q == 1

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The views, in the order of `unpack`."""
        return (
            self.input_ids, self.positions, self.slot_mapping, self.token_slots, self.slots, self.offsets,
            self.last_index, self.sample_slots, self.seq_lens, self.cu_seqlens_q, self.turn,
        )  # fmt: skip


def packed_words(tokens: int, rows: int) -> int:
    """int64 words of a packed buffer."""
    even, four = -(-tokens // 2) * 2, -(-rows // 4) * 4
    return 4 * even + 5 * four + 2  # the last part is of int32: seq_lens, cu_seqlens_q, turn


def unpack(buffer: Any, tokens: int, rows: int, int32: Any) -> tuple[Any, ...]:
    """The arrays of Inputs, in its order, in a packed int64 buffer (a tensor or a numpy array).

    Each starts at a multiple of 16 bytes, so that Triton compiles its kernels once and not for each alignment.
    """
    even, four = -(-tokens // 2) * 2, -(-rows // 4) * 4
    by_token = [buffer[i * even : i * even + tokens] for i in range(4)]
    at = 4 * even
    by_row = [buffer[at + i * four : at + i * four + rows] for i in range(4)]
    small = buffer[at + 4 * four : at + 5 * four + 2].view(int32)
    turn = small[2 * four + 2 : 2 * four + 3]
    return (*by_token, *by_row, small[:rows], small[four : four + rows + 1], turn)


class Staging:
    """Two host buffers used in turn; one is not written again before the copy from it has ended."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)]
        self._events: list[Any] = [None, None]
        self._next = 0

    def copy(
        self, words: int, fill: Callable[[np.ndarray], None], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The device's copy [words] int64 of what `fill` writes into a numpy buffer; into `out` where it is given."""
        i, self._next = self._next, 1 - self._next
        if self._events[i] is not None:
            # Two steps ago: over, unless the caller has more than two under way
            self._events[i].synchronize()
        if self._buffers[i].numel() < words:
            size = max(words, 2 * self._buffers[i].numel())
            self._buffers[i] = torch.empty(size, dtype=torch.int64, pin_memory=self._cuda)
        source = self._buffers[i][:words]
        fill(source.numpy())
        target = torch.empty(words, dtype=torch.int64, device=self._device) if out is None else out[:words]
        target.copy_(source, non_blocking=True)
        if self._cuda:
            self._events[i] = self._events[i] or torch.cuda.Event()
            self._events[i].record()
        return target


class InputBatch:
    """The per-slot state of the inputs, and StepInput -> Inputs.

    block_table  [max_num_seqs + 1, width] int32 on the device
    last_tokens  [max_num_seqs + 1] int64 on the device: the token that each slot sampled last
    sampled      [3, max_num_seqs] int64 on the host, page-locked: the tokens of a step's rows. Steps take the first two
                 by turns; the last is for steps that nobody reads, as a graph's while it is captured
    The last slot is for padding: its blocks are block 0, which the block manager never gives out.
    """

    def __init__(self, device: torch.device, max_num_seqs: int, max_model_len: int, block_size: int):
        self.width = -(-max_model_len // block_size)
        self.dummy = max_num_seqs
        self.block_size = block_size
        self._shift, self._mask = block_size.bit_length() - 1, block_size - 1
        self._mirror = np.zeros((max_num_seqs + 1, self.width), dtype=np.int32)
        self.block_table = torch.zeros(max_num_seqs + 1, self.width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.sampled = torch.zeros(3, max_num_seqs, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._turn = 0
        self._staging, self._updates = Staging(device), Staging(device)

    def update(self, updates: np.ndarray) -> None:
        """Write [U, 3] (slot, column, block) into the block tables, on the host and on the device."""
        n = len(updates)
        if n == 0:
            return
        slots, columns = updates[:, 0], updates[:, 1]
        self._mirror[slots, columns] = updates[:, 2]

        def fill(buffer: np.ndarray) -> None:
            np.multiply(slots, self.width, out=buffer[:n], dtype=np.int64, casting="unsafe")
            buffer[:n] += columns
            # From the mirror: where an entry comes twice, both write the later block.
            buffer[n:].view(np.int32)[:n] = self._mirror[slots, columns]

        packed = self._updates.copy(n + (n + 1) // 2, fill)
        self.block_table.view(-1).scatter_(0, packed[:n], packed[n:].view(torch.int32)[:n])

    def known_ids(self, inputs: Inputs) -> torch.Tensor:
        """[T] int64: the input ids. Those that the host does not know yet are what their slots sampled last."""
        ids = inputs.input_ids
        return torch.where(ids < 0, self.last_tokens.index_select(0, inputs.token_slots), ids)

    def keep(self, tokens: torch.Tensor, inputs: Inputs) -> None:
        """The rows' tokens [num_rows] int64: for the slots' next step, and on their way to the host."""
        rows = len(tokens)
        self.last_tokens.scatter_(0, inputs.slots[:rows], tokens)
        self.sampled[inputs.host_turn, :rows].copy_(tokens, non_blocking=True)

    def sample_slots(self, step: StepInput) -> np.ndarray:
        """[B] int64: the slots whose parameters the sampler uses; the dummy slot's where a prompt is not done."""
        return np.where(step.offsets < 0, self.dummy, step.slots)

    def rows_table(self, inputs: Inputs) -> torch.Tensor:
        """The rows' block tables [B, max_blocks] int32, as wide as the longest row needs (a multiple of 16)."""
        blocks = (inputs.max_seqlen_k + self._mask) >> self._shift
        columns = min(-(-blocks // 16) * 16, self.width)
        return self.block_table[:, :columns].index_select(0, inputs.slots)

    def load(
        self,
        step: StepInput,
        tokens: int | None = None,
        rows: int | None = None,
        out: torch.Tensor | None = None,
        views: Inputs | None = None,
        unread: bool = False,
    ) -> Inputs:
        """Copy a step to the device, padded to so many tokens and rows.

        out     a graph's static buffer, to be copied into
        views   a step of the same sizes that was loaded into `out`: its tensors serve again
        unread  nobody reads what the step samples
        """
        n_rows, n_tokens = len(step.slots), len(step.input_ids)
        tokens, rows = tokens or n_tokens, rows or n_rows
        host: list[np.ndarray] = []
        if not unread:
            self._turn = 1 - self._turn
        turn = len(self.sampled) - 1 if unread else self._turn

        def fill(buffer: np.ndarray) -> None:
            host.extend(unpack(buffer, tokens, rows, np.int32))
            self._fill(step, n_tokens, n_rows, host)
            host[-1][0] = turn

        packed = self._staging.copy(packed_words(tokens, rows), fill, out)
        query_lens = np.zeros(rows, dtype=np.int32)
        query_lens[:n_rows] = step.query_lens
        seq_lens, decodes = host[8].copy(), step.num_decodes
        longest = int(step.seq_lens.max())
        if n_tokens == n_rows:
            numbers = (n_rows, decodes, 1, longest, longest)
        else:
            longest_decode = int(step.seq_lens[:decodes].max()) if decodes else 0
            numbers = (n_rows, decodes, int(step.query_lens.max()), longest, longest_decode)
        tensors = unpack(packed, tokens, rows, torch.int32) if views is None else views.tensors()
        fields: tuple[Any, ...] = (*tensors, *numbers, query_lens, seq_lens, turn)
        return Inputs(*fields)

    def _fill(self, step: StepInput, n: int, b: int, host: list[np.ndarray]) -> None:
        ids, positions, mapping, token_slots, slots, offsets, last, sampled, seq_lens, starts, _ = host
        ids[:n], ids[n:] = step.input_ids, 0
        slots[:b], slots[b:] = step.slots, self.dummy
        offsets[:b], offsets[b:] = np.maximum(step.offsets, 0), 0
        sampled[:b], sampled[b:] = self.sample_slots(step), self.dummy
        seq_lens[:b], seq_lens[b:] = step.seq_lens, 1
        starts[0] = 0
        np.cumsum(step.query_lens, out=starts[1 : b + 1])
        starts[b + 1 :] = n
        np.subtract(starts[1:], 1, out=last)
        if n == b:
            token_slots[:n] = step.slots
            np.subtract(step.seq_lens, 1, out=positions[:n])
        else:
            token_slots[:n] = np.repeat(step.slots, step.query_lens)
            behind = step.seq_lens - starts[1 : b + 1]  # position of token t of a row: t - end + seq_len
            positions[:n] = np.arange(n) + np.repeat(behind, step.query_lens)
        token_slots[n:], positions[n:], mapping[n:] = self.dummy, 0, -1
        at = positions[:n]
        blocks = self._mirror[token_slots[:n], at >> self._shift].astype(np.int64)
        mapping[:n] = (blocks << self._shift) | (at & self._mask)
        if n == b and len(ids) == len(
            slots
        ):  # the padding of a decode batch is rows of one query, not of none
            starts[:] = np.arange(len(starts))
            last[:] = starts[:-1]
