"""The work of a captured step before and after its model, one kernel each: a launch in a graph costs 2 us.

On the CPU, PyTorch does the same work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.engine.sampling.sampler import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P, Drawing, Sampler
from fastkernels.engine.steps.input_batch import InputBatch, Inputs
from fastkernels.overrides.kit.overlap import follow, overlap

_TEMPERATURE, _TOP_P, _MIN_P = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_TOP_K, _SEED = tl.constexpr(TOP_K), tl.constexpr(SEED)


def begin(
    inputs: Inputs, tables: torch.Tensor, batch: InputBatch, sampler: Sampler
) -> tuple[torch.Tensor, Drawing]:
    """Input ids [T] int64, with SAMPLED replaced by the slot's last token, and the rows' sampling parameters.

    Fills the rows' block tables `tables` [groups, B, width] int32 as far as seq_lens reach.
    """
    if inputs.input_ids.is_cuda:
        return begin_triton(inputs, tables, batch, sampler)
    for group, table in enumerate(tables):
        torch.index_select(batch.group_table(group), 0, inputs.slots, out=table)
    return batch.known_ids(inputs), sampler.drawing(inputs.sample_slots)


def finish(tokens: torch.Tensor, inputs: Inputs, batch: InputBatch) -> None:
    """Keep the sampled tokens [B] int64 for the next step, and write them to the host buffer."""
    if tokens.is_cuda:
        finish_triton(tokens, inputs, batch)
        return
    batch.last_tokens.scatter_(0, inputs.slots, tokens)
    batch.sampled[int(inputs.turn), : len(tokens)] = tokens


def begin_triton(
    inputs: Inputs, tables: torch.Tensor, batch: InputBatch, sampler: Sampler
) -> tuple[torch.Tensor, Drawing]:
    ids, slots = inputs.input_ids, inputs.slots
    rows, device = len(slots), ids.device
    out = torch.empty_like(ids)
    floats = [torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3)]
    top_k = torch.empty(rows, dtype=torch.int32, device=device)
    seeds = torch.empty(rows, dtype=torch.int64, device=device)
    _begin_kernel[(max(len(ids), rows),)](
        ids, inputs.token_slots, batch.last_tokens, out, slots, inputs.seq_lens, batch.block_table, tables,
        inputs.sample_slots, sampler.floats, sampler.ints, *floats, top_k, seeds, len(ids), rows, batch.width,
        batch.block_size, sampler.num_slots, batch.dummy + 1, tables.stride(0), GROUPS=len(tables), COLUMNS=1024,
    )  # fmt: skip
    temperature, top_p, min_p = floats
    return out, Drawing(temperature, top_k, top_p, min_p, seeds)


def finish_triton(tokens: torch.Tensor, inputs: Inputs, batch: InputBatch) -> None:
    rows, host = len(tokens), batch.sampled  # pinned: the device writes to it directly
    _finish_kernel[(triton.cdiv(rows, 256),)](
        tokens, inputs.slots, batch.last_tokens, host, inputs.turn, rows, host.stride(0), BLOCK=256,
        **overlap(tokens.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "rows"])
def _begin_kernel(
    ids_ptr, token_slots_ptr, last_ptr, out_ptr, slots_ptr, lens_ptr, tables_ptr, rows_ptr, sample_ptr, floats_ptr,
    ints_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seed_ptr, tokens, rows, width, block_size, num_slots,
    table_rows, group_stride, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Program i handles token i and row i.
    i = tl.program_id(0)
    if i < tokens:
        token = tl.load(ids_ptr + i)
        if token < 0:
            token = tl.load(last_ptr + tl.load(token_slots_ptr + i))
        tl.store(out_ptr + i, token)
    if i < rows:
        floats, ints = floats_ptr + tl.load(sample_ptr + i), ints_ptr + tl.load(sample_ptr + i)
        tl.store(temperature_ptr + i, tl.load(floats + _TEMPERATURE * num_slots))
        tl.store(top_p_ptr + i, tl.load(floats + _TOP_P * num_slots))
        tl.store(min_p_ptr + i, tl.load(floats + _MIN_P * num_slots))
        tl.store(top_k_ptr + i, tl.load(ints + _TOP_K * num_slots).to(tl.int32))
        tl.store(seed_ptr + i, tl.load(ints + _SEED * num_slots))
        used = tl.minimum(tl.cdiv(tl.load(lens_ptr + i), block_size), width)
        for group in tl.static_range(GROUPS):
            source = tables_ptr + (group * table_rows + tl.load(slots_ptr + i)) * width
            target = rows_ptr + group * group_stride + i.to(tl.int64) * width
            for start in range(0, used, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                blocks = tl.load(source + column, mask=column < used)
                tl.store(target + column, blocks, mask=column < used)


@triton.jit(do_not_specialize=["rows"])
def _finish_kernel(
    tokens_ptr, slots_ptr, last_ptr, host_ptr, turn_ptr, rows, stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    token = tl.load(tokens_ptr + row, mask=mask)
    tl.store(last_ptr + tl.load(slots_ptr + row, mask=mask), token, mask=mask)
    tl.store(host_ptr + tl.load(turn_ptr) * stride + row, token, mask=mask)
