"""The bookkeeping between the passes of a draft model, one kernel each. On the CPU, PyTorch does the same work."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastkernels.engine.steps.input_batch import InputBatch, Inputs
from fastkernels.engine.steps.step import MADE, SAMPLED


class Held(NamedTuple):
    """Numbers that the device keeps of each slot between two steps with drafts in a chain, [slots] int64 each.

    lag     drafts of its last step that were not accepted. A step that was scheduled before the host knew them counts
            them as tokens
    shift   `lag` that the step under way has taken from its rows
    first   the first token of that step's row, if the host does not know it
    drafts  [slots, count]: those of its next step
    """

    lag: torch.Tensor
    shift: torch.Tensor
    first: torch.Tensor
    drafts: torch.Tensor

    @staticmethod
    def zeros(slots: int, count: int, device: torch.device) -> Held:
        lag, shift, first = torch.zeros(3, slots, dtype=torch.int64, device=device).unbind()
        return Held(lag, shift, first, torch.zeros(slots, count, dtype=torch.int64, device=device))


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
    "unsure",
)  # fmt: skip
TOKENS, SLOT, ROOM, UNSURE = map(COLUMNS.index, ("tokens", "slot", "room", "unsure"))


def settle(inputs: Inputs, batch: InputBatch, held: Held, unsure: torch.Tensor | None) -> None:
    """Correct the inputs of a step that was scheduled before the host knew the tokens of the step before it.

    Such a step counts all drafts of the step before as accepted. Positions, lengths, offsets and places in the cache
    become those behind the accepted ones, and ids below 0 the tokens of their slots: see step.SAMPLED and MADE.

    unsure: [B or more] int64: 1 for rows with such drafts. None: the rows and ids of the step that `held` is of, for a
    pass over its tokens
    """
    if inputs.input_ids.is_cuda:
        settle_triton(inputs, batch, held, unsure)
        return
    slots, starts = inputs.slots, inputs.cu_seqlens_q.long()
    last = held.first if unsure is None else batch.last_tokens
    if unsure is None:
        shift = held.shift[slots]
    else:
        shift = torch.where(unsure[: len(slots)] > 0, held.lag[slots], 0)
        held.shift[slots] = shift
    inputs.seq_lens.sub_(shift.to(torch.int32))
    inputs.offsets.sub_(shift)
    rows = torch.repeat_interleave(starts.diff())  # of each token
    n = len(rows)
    ids, of, back = inputs.input_ids[:n], inputs.token_slots[:n], shift[rows]
    known = torch.where(ids == SAMPLED, last[of], held.drafts[of, (MADE - ids).clamp_min(0)])
    ids.copy_(torch.where(ids < 0, known, ids))
    if unsure is not None:
        held.first[slots] = inputs.input_ids[starts[:-1].clamp_max(len(inputs.input_ids) - 1)]
    inputs.positions[:n] -= back
    at = inputs.positions[:n] - batch.device_shifts[of]  # the token's number: media change positions only
    for group, mapping in enumerate((inputs.slot_mapping, *inputs.more_slot_mappings)):
        block = batch.group_table(group)[of, at // batch.block_size].long()
        moved = block * batch.block_size + at % batch.block_size
        mapping[:n] = torch.where(back > 0, moved, mapping[:n])


def settle_triton(inputs: Inputs, batch: InputBatch, held: Held, unsure: torch.Tensor | None) -> None:
    again, more = unsure is None, inputs.more_slot_mappings
    # Views of one buffer, at equal distances
    apart = more[1].storage_offset() - more[0].storage_offset() if len(more) > 1 else 0
    _settle_kernel[(len(inputs.slots),)](
        inputs.input_ids, inputs.positions, inputs.slot_mapping, more[0] if more else inputs.slot_mapping, inputs.slots,
        inputs.offsets, inputs.seq_lens, inputs.cu_seqlens_q, held.first if again else batch.last_tokens,
        held.lag if unsure is None else unsure, held.lag, held.shift, held.first, held.drafts,
        batch.device_shifts, batch.block_table, batch.width, batch.dummy + 1, apart, batch.block_size,
        GROUPS=batch.groups, COUNT=held.drafts.shape[1], AGAIN=again,
    )  # fmt: skip


def accept(
    packed: torch.Tensor, ids: torch.Tensor, sampled: torch.Tensor, out: Rows, count: int, eagle: bool, held: Held,
    last_tokens: torch.Tensor,
) -> None:  # fmt: skip
    """Find how many drafts of each row are accepted, and fill `out`, `held.lag` and `last_tokens`.

    packed   [len(COLUMNS), R] int64, of each row:
             start, tokens       its first token in `ids`, and their number
             drafts              the last of these
             place               its first token in `sampled`
             offset, slot, room  see Rows; offset: of the token before the first draft
             known               the token behind the row's last one, or -1
             forced              number of accepted drafts, or -1
             own_start, extra    its first token in the first pass, and how many it has in addition there
             before              tokens computed before the step
             unsure              see `settle`, which has corrected ids; offset and before are as the host knows them
    ids      [T] int64 of the step
    sampled  [S] int64: for each row, the token before its first draft, and one behind each
    count    most drafts of a row
    """
    if ids.is_cuda:
        accept_triton(packed, ids, sampled, out, count, eagle, held, last_tokens)
        return
    start, n, drafts, place, offset, known, forced, own_start, extra, before, slot, room, _ = packed.unbind()
    shift = held.shift[slot]
    offset, before = offset - shift, before - shift
    inside = torch.arange(count, device=ids.device)
    theirs = sampled[(place[:, None] + inside).clamp_max(len(sampled) - 1)]
    ours = ids[((start + n - drafts)[:, None] + inside).clamp_max(len(ids) - 1)]
    same = (theirs == ours) & (inside < drafts[:, None])
    accepted = torch.where(forced < 0, same.long().cumprod(1).sum(1), forced)
    token = torch.where(known < 0, sampled[place + accepted], known)
    held.lag[slot], last_tokens[slot] = drafts - accepted, token
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
    packed: torch.Tensor, ids: torch.Tensor, sampled: torch.Tensor, out: Rows, count: int, eagle: bool, held: Held,
    last_tokens: torch.Tensor,
) -> None:  # fmt: skip
    rows = packed.shape[1]
    _accept_kernel[(rows,)](
        packed, ids, sampled, *out, held.lag, held.shift, last_tokens, rows, COUNT=count, EAGLE=eagle
    )


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


@triton.jit(do_not_specialize=["width", "table_rows", "apart"])
def _settle_kernel(
    ids_ptr, positions_ptr, mapping_ptr, more_ptr, slots_ptr, offsets_ptr, lens_ptr, starts_ptr, last_ptr, unsure_ptr,
    lag_ptr, shift_ptr, first_ptr, drafts_ptr, media_ptr, table_ptr, width, table_rows, apart, block_size,
    GROUPS: tl.constexpr, COUNT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    # One program per row. Rows with more tokens than drafts can have are prompts, whose tokens are known.
    row = tl.program_id(0)
    slot, start = tl.load(slots_ptr + row), tl.load(starts_ptr + row).to(tl.int64)
    n = tl.load(starts_ptr + row + 1).to(tl.int64) - start
    if AGAIN:
        shift = tl.load(shift_ptr + slot)
    else:
        shift = tl.where(tl.load(unsure_ptr + row) > 0, tl.load(lag_ptr + slot), 0)
        tl.store(shift_ptr + slot, shift)
    tl.store(lens_ptr + row, tl.load(lens_ptr + row) - shift.to(tl.int32))
    tl.store(offsets_ptr + row, tl.load(offsets_ptr + row) - shift)
    last, media = tl.load(last_ptr + slot), tl.load(media_ptr + slot)
    most: tl.constexpr = COUNT + 1 + AGAIN  # a pass over a step's tokens may have one more
    if n <= most:
        for i in tl.static_range(most):
            if i < n:
                token = tl.load(ids_ptr + start + i)
                if token < 0:
                    if token < -1:
                        token = tl.load(drafts_ptr + slot * COUNT - 2 - token)
                    else:
                        token = last
                    tl.store(ids_ptr + start + i, token)
                if i == 0 and not AGAIN:
                    tl.store(first_ptr + slot, token)
                if shift > 0:
                    at = tl.load(positions_ptr + start + i) - shift
                    tl.store(positions_ptr + start + i, at)
                    at -= media
                    for group in tl.static_range(GROUPS):
                        table = table_ptr + (group * table_rows + slot) * width
                        block = tl.load(table + at // block_size).to(tl.int64)
                        place = block * block_size + at % block_size
                        if group == 0:
                            tl.store(mapping_ptr + start + i, place)
                        else:
                            tl.store(more_ptr + (group - 1) * apart + start + i, place)


@triton.jit(do_not_specialize=["size"])
def _accept_kernel(
    packed_ptr, ids_ptr, sampled_ptr, last_ptr, token_ptr, at_ptr, offset_ptr, slot_ptr, room_ptr, lag_ptr, shift_ptr,
    last_tokens_ptr, size, COUNT: tl.constexpr, EAGLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = packed_ptr + row
    start, n = tl.load(column), tl.load(column + size)
    drafts, place = tl.load(column + 2 * size), tl.load(column + 3 * size)
    offset, known = tl.load(column + 4 * size), tl.load(column + 5 * size)
    forced, own_start = tl.load(column + 6 * size), tl.load(column + 7 * size)
    extra, before = tl.load(column + 8 * size), tl.load(column + 9 * size)
    slot = tl.load(column + 10 * size)
    shift = tl.load(shift_ptr + slot)
    offset, before = offset - shift, before - shift
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
    tl.store(lag_ptr + slot, drafts - accepted)
    tl.store(last_tokens_ptr + slot, token)
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
    tl.store(slot_ptr + row, slot)
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
