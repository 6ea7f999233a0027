"""Makes the StepInput of a scheduled batch."""

from __future__ import annotations

import numpy as np

from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.scheduling.request import BlockTable, Request
from fastkernels.engine.scheduling.scheduler import Batch
from fastkernels.engine.steps.step import (
    NO_COPIES,
    SAMPLED,
    Encoding,
    NextDrafts,
    PromptTargets,
    StepInput,
    StepMedia,
    StepSources,
)

LONG = 64  # blocks of a request whose updates are made at once


def make_step(batch: Batch, num_slots: int, block_size: int = 1) -> StepInput:
    """The batch's StepInput. Marks its blocks as sent. num_slots: rows of a group's block tables.

    block_size: of these, for a draft model
    """
    ids: list[int] = []
    updates: list[tuple[int, int, int]] = []
    long: list[np.ndarray] = []  # more updates, of many blocks each
    for row, request in enumerate(batch.requests):
        if row < batch.num_decodes:
            ids.append(_last_token(request))
        else:
            drafts = batch.drafts[row] if batch.drafts else []
            start, end = batch.starts[row], batch.starts[row] + batch.counts[row] - len(drafts)
            known = request.token_ids(start, end)
            ids += [*known, *[SAMPLED] * (end - start - len(known)), *drafts]
        for group, table in enumerate(request.block_tables):
            if len(table.blocks) > table.num_sent or table.num_freed > table.num_freed_sent:
                _send(table, group * num_slots + request.slot, updates, long)
    query_lens = np.array(batch.counts, np.int32)
    return StepInput(
        slots=np.array([r.slot for r in batch.requests], np.int64),
        query_lens=query_lens,
        seq_lens=np.array(batch.starts, np.int32) + query_lens,
        offsets=np.array(batch.offsets, np.int64),
        input_ids=np.array(ids, np.int64),
        num_decodes=batch.num_decodes,
        block_updates=np.concatenate([np.array(updates, np.int32).reshape(-1, 3), *long]),
        new_rows=[_new_row(r) for r in batch.admitted],
        prompt_targets=_prompt_targets(batch),
        masked=batch.masked,
        state_loads=np.array(batch.state_loads, np.int32).reshape(-1, 2) if batch.state_loads else NO_COPIES,
        media=_media(batch) if batch.media else None,
        sources=_sources(batch) if batch.sources else None,
        drafts=np.array([len(d) for d in batch.drafts], np.int32) if batch.drafts else None,
        next_drafts=None if batch.num_next is None else _next_drafts(batch, batch.num_next, block_size),
        state_saves=np.array(batch.state_saves, np.int32).reshape(-1, 2) if batch.state_saves else NO_COPIES,
    )


def _next_drafts(batch: Batch, count: int, block_size: int) -> NextDrafts:
    """The input of a draft model. Behind the last token of a chunk, the next one of the prompt is known."""
    ids, room = [], []
    for request, start, tokens in zip(batch.requests, batch.starts, batch.counts, strict=True):
        end = start + tokens
        behind = request.token_ids(end, end + 1) if end < request.num_known_tokens else []
        ids.append(behind[0] if behind else SAMPLED)
        room.append(min(len(table.blocks) for table in request.block_tables) * block_size)
    forced = np.array(batch.forced, np.int32) if batch.forced else None
    unsure = np.array(batch.unsure, np.int32) if any(batch.unsure) else None
    ids_known, rooms = np.array(ids, np.int64), np.array(room, np.int32)
    return NextDrafts(count, ids_known, rooms, forced, unsure, batch.shows_drafts)


def _send(table: BlockTable, row: int, updates: list[tuple[int, int, int]], long: list[np.ndarray]) -> None:
    blocks, sent = table.blocks, table.num_sent
    # A freed block gets another sequence's keys, so the kernels must not even load it.
    updates += [(row, column, 0) for column in range(table.num_freed_sent, min(table.num_freed, sent))]
    if len(blocks) - sent < LONG:
        updates += [(row, column, blocks[column]) for column in range(sent, len(blocks))]
    else:
        new = np.empty((len(blocks) - sent, 3), np.int32)
        new[:, 0], new[:, 1], new[:, 2] = row, np.arange(sent, len(blocks)), blocks[sent:]
        long.append(new)
    table.num_sent, table.num_freed_sent = len(blocks), table.num_freed


def _last_token(request: Request) -> int:
    """The token at the request's last computed position; SAMPLED if it is unknown."""
    at = request.num_computed_tokens - 1 - len(request.prompt_token_ids)
    if at < 0:
        return request.prompt_token_ids[at]
    return request.output_token_ids[at] if at < len(request.output_token_ids) else SAMPLED


def _new_row(request: Request) -> NewRow:
    counts = request.params.needs_penalties
    return NewRow(
        request.slot,
        request.params,
        request.seed,
        request.end_token_ids,
        tuple(request.prompt_token_ids) if counts else (),
        tuple(request.output_token_ids) if request.params.needs_history else (),
        request.shift,
    )


def _sources(batch: Batch) -> StepSources:
    rows = [np.array(request.cross_blocks, np.int32) for request, _ in batch.sources]
    encodes = [
        (request.source.values, row)
        for (request, computes), row in zip(batch.sources, rows, strict=True)
        if computes and request.source is not None
    ]
    return StepSources(np.array([r.slot for r, _ in batch.sources], np.int64), np.stack(rows), encodes)


def _media(batch: Batch) -> StepMedia:
    spans: list[tuple[int, bytes, int, int]] = []
    rows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    token = 0  # of the step
    for request, start, count in zip(batch.requests, batch.starts, batch.counts, strict=True):
        stop = min(start + count, request.media_end)
        if start < stop:
            assert request.positions is not None
            rows.append(np.arange(token, token + stop - start))
            positions.append(request.positions[:, start:stop])
            for item in request.media:
                first, last = max(item.start, start), min(item.end, stop)
                if first < last:
                    spans.append((token + first - start, item.digest, first - item.start, last - first))
        token += count
    encodes = [Encoding(m.kind, m.digest, m.values, m.grid, m.size) for m in batch.encodes]
    return StepMedia(
        batch.dropped,
        encodes,
        spans,
        np.concatenate([np.empty(0, np.int64), *rows]),
        np.concatenate([np.empty((3, 0), np.int64), *positions], axis=1),
    )


def _prompt_targets(batch: Batch) -> list[PromptTargets]:
    found = []
    for row, (request, count) in enumerate(zip(batch.requests, batch.counts, strict=True)):
        if request.params.prompt_logprobs is not None and request.needs_prompt_logprobs:
            first = batch.starts[row] + 1
            targets = request.prompt_token_ids[first : first + count]
            if targets:
                wanted = request.params.prompt_logprobs
                found.append(PromptTargets(row, wanted, np.array(targets, np.int64)))
    return found
