"""Copies a step's inputs to the device: pinned staging buffers, one packed copy, and the block tables.

Positions and KV-cache slots are computed in numpy from a host mirror of the block tables. Nothing here waits for the
device, and no Python loop runs over rows or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.steps.step import StepInput

TURN, FIXED = 10, 13  # the place of `turn` among the arrays of a packed buffer, and how many all steps have
NUMPY, TORCH = (np.int32, np.bool_), (torch.int32, torch.bool)


@dataclass(frozen=True)
class Inputs:
    """A step padded to T tokens and B rows. Tensors are views of one packed buffer, on the device.

    input_ids, positions, slot_mapping, token_slots  [T] int64; token_slots: the slot of each token's row
    slots, offsets, last_index                       [B] int64; last_index: index of each row's last token
    sample_slots                                     [B] int64: slots; the dummy slot where nothing is sampled
    seq_lens [B], cu_seqlens_q [B + 1]               int32
    turn                                             [1] int32: the row of InputBatch.sampled for the step's tokens
    state_slots, fresh                               [B] int32 and bool: see AttentionMetadata
    num_rows, num_decodes                            on the host: rows without padding, and those with one query
    max_seqlen_q, max_seqlen_k, max_decode_seqlen_k  on the host
    host_query_lens, host_seq_lens                   [B] int32 numpy, with padding
    host_turn                                        `turn` on the host
    more_slot_mappings                               [T] int64 each: slot_mapping of groups of layers after the first
    nodes                                            [T] int64: each token's node in a tree of drafts, or 0; None
                                                     without trees
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
    state_slots: torch.Tensor
    fresh: torch.Tensor
    num_rows: int
    num_decodes: int
    max_seqlen_q: int
    max_seqlen_k: int
    max_decode_seqlen_k: int
    host_query_lens: np.ndarray
    host_seq_lens: np.ndarray
    host_turn: int
    more_slot_mappings: tuple[torch.Tensor, ...] = ()
    nodes: torch.Tensor | None = None

    @property
    def decode_only(self) -> bool:
        return self.max_seqlen_q == 1

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The device tensors, in the order of `unpack`."""
        return (
            self.input_ids, self.positions, self.slot_mapping, self.token_slots, self.slots, self.offsets,
            self.last_index, self.sample_slots, self.seq_lens, self.cu_seqlens_q, self.turn, self.state_slots,
            self.fresh, *self.more_slot_mappings, *(() if self.nodes is None else (self.nodes,)),
        )  # fmt: skip


def packed_words(tokens: int, rows: int, groups: int = 1) -> int:
    """The size of a packed buffer in int64 words. groups: of layers, each with a slot_mapping; one more for nodes."""
    even, four = -(-tokens // 2) * 2, -(-rows // 4) * 4
    # after 5 * four words int32 ends: seq_lens, cu_seqlens_q, turn; then state_slots and fresh in four words
    return 4 * even + 6 * four + 2 + (groups - 1) * even


def unpack(buffer: Any, tokens: int, rows: int, types: tuple[Any, Any], groups: int = 1) -> tuple[Any, ...]:
    """The arrays of Inputs, in order, as views of a packed int64 buffer (a tensor or a numpy array).

    types: NUMPY or TORCH, its int32 and bool

    Each starts at a multiple of 16 bytes, so that Triton compiles each kernel for one alignment only.
    """
    even, four = -(-tokens // 2) * 2, -(-rows // 4) * 4
    by_token = [buffer[i * even : i * even + tokens] for i in range(4)]
    at = 4 * even
    by_row = [buffer[at + i * four : at + i * four + rows] for i in range(4)]
    small = buffer[at + 4 * four : at + 6 * four + 2].view(types[0])
    turn = small[2 * four + 2 : 2 * four + 3]
    state_slots = small[2 * four + 4 : 2 * four + 4 + rows]
    fresh = small[3 * four + 4 :].view(types[1])[:rows]
    at += 6 * four + 2
    more = [buffer[at + i * even : at + i * even + tokens] for i in range(groups - 1)]
    return (*by_token, *by_row, small[:rows], small[four : four + rows + 1], turn, state_slots, fresh, *more)


class Staging:
    """Two alternating host buffers. A buffer is written again only after its last copy has ended."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)]
        self._events: list[Any] = [None, None]
        self._next = 0

    def copy(
        self, words: int, fill: Callable[[np.ndarray], None], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Copy to the device what `fill` writes into a numpy buffer: [words] int64, in `out` if given."""
        i, self._next = self._next, 1 - self._next
        if self._events[i] is not None:
            # From two steps ago: finished, unless more than two are in flight
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
    """The per-slot state of the inputs; turns a StepInput into Inputs.

    block_table  [groups * (max_num_seqs + 1), width] int32 on the device: the rows of each group of layers
    last_tokens  [max_num_seqs + 1] int64 on the device: the token that each slot sampled last
    sampled      [3, max_num_seqs] int64 in pinned host memory: the tokens of a step's rows. Steps alternate between the
                 first two rows; the third takes results that are never read, e.g. during capture
    shifts       [max_num_seqs + 1] int64 on the host: NewRow.shift of each slot; device_shifts: on the device
    The last slot is for padding: its blocks are the reserved block 0.
    trees: drafts are in trees, and inputs have `nodes`
    """

    def __init__(
        self, device: torch.device, max_num_seqs: int, max_model_len: int, block_size: int, groups: int = 1,
        trees: bool = False,
    ):  # fmt: skip
        self.width = -(-max_model_len // block_size)
        self.dummy, self.groups, self.trees = max_num_seqs, groups, trees
        self.arrays = groups + trees  # of a packed buffer: see packed_words
        self.block_size = block_size
        self._shift, self._mask = block_size.bit_length() - 1, block_size - 1
        self._mirror = np.zeros((groups * (max_num_seqs + 1), self.width), dtype=np.int32)
        self.block_table = torch.zeros(self._mirror.shape, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.sampled = torch.zeros(3, max_num_seqs, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.shifts, self._shifted = np.zeros(max_num_seqs + 1, dtype=np.int64), False
        self.device_shifts = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._turn = 0
        self._staging, self._updates = Staging(device), Staging(device)

    def update(self, updates: np.ndarray) -> None:
        """Write updates [U, 3] (row, column, block) into the block tables on the host and the device."""
        n = len(updates)
        if n == 0:
            return
        rows, columns = updates[:, 0], updates[:, 1]
        self._mirror[rows, columns] = updates[:, 2]

        def fill(buffer: np.ndarray) -> None:
            np.multiply(rows, self.width, out=buffer[:n], dtype=np.int64, casting="unsafe")
            buffer[:n] += columns
            # From the mirror, so that duplicate entries all write the latest block.
            buffer[n:].view(np.int32)[:n] = self._mirror[rows, columns]

        packed = self._updates.copy(n + (n + 1) // 2, fill)
        self.block_table.view(-1).scatter_(0, packed[:n], packed[n:].view(torch.int32)[:n])

    def known_ids(self, inputs: Inputs) -> torch.Tensor:
        """[T] int64: the input ids; ids unknown to the host are replaced by what their slots sampled last."""
        ids = inputs.input_ids
        return torch.where(ids < 0, self.last_tokens.index_select(0, inputs.token_slots), ids)

    def keep(self, tokens: torch.Tensor, inputs: Inputs) -> None:
        """Keep the sampled tokens [num_rows] int64 for the next step, and start copying them to the host."""
        rows = len(tokens)
        self.last_tokens.scatter_(0, inputs.slots[:rows], tokens)
        self.sampled[inputs.host_turn, :rows].copy_(tokens, non_blocking=True)

    def set_shifts(self, new_rows: Sequence[NewRow]) -> None:
        """Set the shifts of slots that get another request."""
        before = self.shifts.copy()
        for row in new_rows:
            self.shifts[row.slot] = row.shift
        self._shifted = bool(self.shifts.any())
        if not np.array_equal(before, self.shifts):
            self.device_shifts.copy_(torch.from_numpy(self.shifts))

    def sample_slots(self, step: StepInput) -> np.ndarray:
        """[B] int64: the slots for the sampler; the dummy slot where a prompt is not complete."""
        return np.where(step.offsets < 0, self.dummy, step.slots)

    def group_table(self, group: int = 0) -> torch.Tensor:
        """The part of block_table of one group of layers, [max_num_seqs + 1, width]."""
        rows = self.dummy + 1
        return self.block_table[group * rows : (group + 1) * rows]

    def rows_tables(self, inputs: Inputs) -> list[torch.Tensor]:
        """The rows' block tables [B, max_blocks] int32 of each group, wide enough for the longest row (a multiple of
        16).
        """
        blocks = (inputs.max_seqlen_k + self._mask) >> self._shift
        columns = min(-(-blocks // 16) * 16, self.width)
        return [
            self.group_table(group)[:, :columns].index_select(0, inputs.slots) for group in range(self.groups)
        ]

    def load(
        self,
        step: StepInput,
        tokens: int | None = None,
        rows: int | None = None,
        out: torch.Tensor | None = None,
        views: Inputs | None = None,
        unread: bool = False,
    ) -> Inputs:
        """Copy a step to the device, padded to `tokens` and `rows`.

        out     the static buffer of a graph to copy into
        views   Inputs of the same sizes loaded into `out` before; its tensors are reused
        unread  the sampled tokens are never read
        """
        n_rows, n_tokens = len(step.slots), len(step.input_ids)
        tokens, rows = tokens or n_tokens, rows or n_rows
        host: list[np.ndarray] = []
        if not unread:
            self._turn = 1 - self._turn
        turn = len(self.sampled) - 1 if unread else self._turn

        def fill(buffer: np.ndarray) -> None:
            host.extend(unpack(buffer, tokens, rows, NUMPY, self.arrays))
            self._fill(step, n_tokens, n_rows, host)
            host[TURN][0] = turn

        packed = self._staging.copy(packed_words(tokens, rows, self.arrays), fill, out)
        query_lens = np.zeros(rows, dtype=np.int32)
        query_lens[:n_rows] = step.query_lens
        seq_lens, decodes = host[8].copy(), step.num_decodes
        longest = int(step.seq_lens.max())
        if n_tokens == n_rows:
            numbers = (n_rows, decodes, 1, longest, longest)
        else:
            longest_decode = int(step.seq_lens[:decodes].max()) if decodes else 0
            numbers = (n_rows, decodes, int(step.query_lens.max()), longest, longest_decode)
        if views is None:
            tensors = unpack(packed, tokens, rows, TORCH, self.arrays)
        else:
            tensors = views.tensors()
        first, more = tensors[:FIXED], tensors[FIXED:]
        more, nodes = (more[:-1], more[-1]) if self.trees else (more, None)
        fields: tuple[Any, ...] = (*first, *numbers, query_lens, seq_lens, turn, more, nodes)
        return Inputs(*fields)

    def _fill(self, step: StepInput, n: int, b: int, host: list[np.ndarray]) -> None:
        ids, positions, mapping, token_slots, slots, offsets, last, sampled, seq_lens, starts, *more = host
        _, state_slots, fresh, *more = more
        ids[:n], ids[n:] = step.input_ids, 0
        slots[:b], slots[b:] = step.slots, self.dummy
        offsets[:b], offsets[b:] = np.maximum(step.offsets, 0), 0
        sampled[:b], sampled[b:] = self.sample_slots(step), self.dummy
        seq_lens[:b], seq_lens[b:] = step.seq_lens, 1
        state_slots[:b] = (step.slots + 1) % (self.dummy + 1)  # 0 for the dummy slot
        np.equal(step.query_lens, step.seq_lens, out=fresh[:b])
        state_slots[b:], fresh[b:] = 0, True
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
        token_slots[n:], positions[n:] = self.dummy, 0
        if self.trees:
            nodes = more.pop()
            nodes[:] = 0
            if step.drafts is not None:
                before = starts[1 : b + 1] - step.drafts - 1  # the tokens whose drafts follow
                nodes[:n] = np.maximum(np.arange(n) - np.repeat(before, step.query_lens), 0)
        at = positions[:n]
        slots_of_tokens = token_slots[:n]
        for group, slot_mapping in enumerate((mapping, *more)):
            slot_mapping[n:] = -1
            blocks = self._mirror[slots_of_tokens + group * (self.dummy + 1), at >> self._shift].astype(
                np.int64
            )
            slot_mapping[:n] = (blocks << self._shift) | (at & self._mask)
        if self._shifted:
            at += self.shifts[slots_of_tokens]
        if n == b and len(ids) == len(slots):  # padding rows of a decode batch have one query
            starts[:] = np.arange(len(starts))
            last[:] = starts[:-1]
