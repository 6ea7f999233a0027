"""The bookkeeping between the passes of a draft model, one kernel each. On the CPU, PyTorch does the same work."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastkernels.engine.execution.input_batch import InputBatch


class Rows(NamedTuple):
    """The rows of the passes after a step, [R] int64 each.

    last    index of the row's last token in the first pass, which is the sampled one
    token   that token
    at      its position
    offset  number of the sampled token among those that the request has generated
    slot, room  of the row: see StepInput and NextDrafts
    """

    last: torch.Tensor
    token: torch.Tensor
    at: torch.Tensor
    offset: torch.Tensor
    slot: torch.Tensor
    room: torch.Tensor


# Rows of the packed numbers that `accept` reads
COLUMNS = (
    "start", "tokens", "drafts", "place", "offset", "known", "forced", "own_start", "extra", "before", "slot", "room",
)  # fmt: skip


def accept(
    packed: torch.Tensor, ids: torch.Tensor, sampled: torch.Tensor, out: Rows, count: int, eagle: bool
) -> None:
    """Find how many drafts of each row are accepted, and fill `out`.

    packed   [len(COLUMNS), R] int64, of each row:
             start, tokens       its first token in `ids`, and their number
             drafts              the last of these
             place               its first token in `sampled`
             offset, slot, room  see Rows; offset: of the token before the first draft
             known               the token behind the row's last one, or -1
             forced              number of accepted drafts, or -1
             own_start, extra    its first token in the first pass, and how many it has in addition there
             before              tokens computed before the step
    ids      [T] int64 of the step
    sampled  [S] int64: for each row, the token before its first draft, and one behind each
    count    most drafts of a row
    """
    if ids.is_cuda:
        accept_triton(packed, ids, sampled, out, count, eagle)
        return
    start, n, drafts, place, offset, known, forced, own_start, extra, before, slot, room = packed.unbind()
    inside = torch.arange(count, device=ids.device)
    theirs = sampled[(place[:, None] + inside).clamp_max(len(sampled) - 1)]
    ours = ids[((start + n - drafts)[:, None] + inside).clamp_max(len(ids) - 1)]
    same = (theirs == ours) & (inside < drafts[:, None])
    accepted = torch.where(forced < 0, same.long().cumprod(1).sum(1), forced)
    token = torch.where(known < 0, sampled[place + accepted], known)
    valid = n - drafts + accepted
    if eagle:
        last = valid - 1
    else:  # a row without room for the sampled token ends with its own last one
        last = torch.minimum(valid, n + extra - 1)
        token = torch.where(valid > last, ids[start + n - 1], token)
    for target, value in zip(
        out, (own_start + last, token, before + last, offset + accepted, slot, room), strict=True
    ):
        target.copy_(value)


def accept_triton(
    packed: torch.Tensor, ids: torch.Tensor, sampled: torch.Tensor, out: Rows, count: int, eagle: bool
) -> None:
    rows = packed.shape[1]
    _accept_kernel[(rows,)](packed, ids, sampled, *out, rows, COUNT=count, EAGLE=eagle)


class Advanced(NamedTuple):
    """The inputs of a pass over one token of each of B rows.

    positions [B] int64, seq_lens [B] int32, slot_mapping [groups, B] int64
    """

    positions: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor


def advance(rows: Rows, step: int, longest: int, batch: InputBatch) -> Advanced:
    """The inputs of the pass `step` tokens behind `rows.at`. Nothing is stored where a row has no room.

    longest: positions beyond the last of these count as the last one
    """
    if rows.at.is_cuda:
        return advance_triton(rows, step, longest, batch)
    at = (rows.at + step).clamp_max(longest - 1)
    column, inside = at // batch.block_size, at % batch.block_size
    mappings = []
    for group in range(batch.groups):
        block = batch.group_table(group)[rows.slot, column].long()
        mappings.append(torch.where(at < rows.room, block * batch.block_size + inside, -1))
    return Advanced(at, (at + 1).to(torch.int32), torch.stack(mappings))


def advance_triton(rows: Rows, step: int, longest: int, batch: InputBatch) -> Advanced:
    count, device = len(rows.at), rows.at.device
    made = Advanced(
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(batch.groups, count, dtype=torch.int64, device=device),
    )
    _advance_kernel[(triton.cdiv(count, 128),)](
        rows.at, rows.slot, rows.room, batch.block_table, *made, count, step, longest, batch.width, batch.dummy + 1,
        batch.block_size, GROUPS=batch.groups, BLOCK=128,
    )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["size"])
def _accept_kernel(
    packed_ptr, ids_ptr, sampled_ptr, last_ptr, token_ptr, at_ptr, offset_ptr, slot_ptr, room_ptr, size,
    COUNT: tl.constexpr, EAGLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = packed_ptr + row
    start, n = tl.load(column), tl.load(column + size)
    drafts, place = tl.load(column + 2 * size), tl.load(column + 3 * size)
    offset, known = tl.load(column + 4 * size), tl.load(column + 5 * size)
    forced, own_start = tl.load(column + 6 * size), tl.load(column + 7 * size)
    extra, before = tl.load(column + 8 * size), tl.load(column + 9 * size)
    accepted = tl.zeros_like(n)
    going = accepted + 1
    for i in tl.static_range(COUNT):
        drafted = i < drafts
        theirs = tl.load(sampled_ptr + place + i, mask=drafted, other=-1)
        ours = tl.load(ids_ptr + start + n - drafts + i, mask=drafted, other=-2)
        going *= (theirs == ours).to(tl.int64)
        accepted += going
    accepted = tl.where(forced < 0, accepted, forced)
    token = tl.where(known < 0, tl.load(sampled_ptr + place + accepted), known)
    valid = n - drafts + accepted
    if EAGLE:
        last = valid - 1
    else:
        last = tl.minimum(valid, n + extra - 1)
        token = tl.where(valid > last, tl.load(ids_ptr + start + n - 1), token)
    tl.store(last_ptr + row, own_start + last)
    tl.store(token_ptr + row, token)
    tl.store(at_ptr + row, before + last)
    tl.store(offset_ptr + row, offset + accepted)
    tl.store(slot_ptr + row, tl.load(column + 10 * size))
    tl.store(room_ptr + row, tl.load(column + 11 * size))


@triton.jit(do_not_specialize=["rows", "step"])
def _advance_kernel(
    at_ptr, slot_ptr, room_ptr, table_ptr, positions_ptr, lens_ptr, mapping_ptr, rows, step, longest, width, table_rows,
    block_size, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    at = tl.minimum(tl.load(at_ptr + row, mask=mask, other=0) + step, longest - 1)
    slot = tl.load(slot_ptr + row, mask=mask, other=0)
    stored = at < tl.load(room_ptr + row, mask=mask, other=0)
    tl.store(positions_ptr + row, at, mask=mask)
    tl.store(lens_ptr + row, (at + 1).to(tl.int32), mask=mask)
    for group in tl.static_range(GROUPS):
        table = table_ptr + (group * table_rows + slot) * width
        block = tl.load(table + at // block_size, mask=mask & stored, other=0).to(tl.int64)
        place = tl.where(stored, block * block_size + at % block_size, -1)
        tl.store(mapping_ptr + group * rows + row, place, mask=mask)
