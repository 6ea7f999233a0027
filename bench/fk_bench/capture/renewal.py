"""New values like the recorded ones: with their statistics, but none that a table of the captures could contain.

Recorded values are public. Kept are the properties that make a call as expensive as the recorded one: the loads of
experts, up to a tenth of the tokens; the numbers of blocks of sequences; repeated tokens; runs of positions. All
integers that these do not determine are drawn anew for every set of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Values = dict[str, Any]
MOVED = 0.1  # of the tokens get one other expert
PASSES = 4  # exchanges of experts for each of a token's choices
SWAPPED = 0.1  # of the blocks of a cache trade their numbers
JITTER = 0.1  # relative change of a routing weight


def renewed(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], seed: int) -> Values:
    """New values for these arguments. shapes: of all tensors of the call, by argument; scalars stay."""
    draw, new = torch.Generator().manual_seed(seed), dict(values)
    if "topk_ids" in new and new["topk_ids"].numel():
        experts = int(new["topk_ids"].max()) + 1
        for name in ("expert_map", "w1"):  # of all ranks, or of this one
            if name in shapes:
                experts = max(experts, shapes[name][0])
                break
        new |= _routing(new, experts, draw)
    if "block_table" in new or "slot_mapping" in new:
        new |= _cache(new, shapes["key_cache"], draw)
    if "slots" in new and "state" in shapes:
        new["slots"] = _slots(new["slots"], shapes["state"][0], draw)
    if "positions" in new:
        rows = shapes["cos_sin_cache"][0] if "cos_sin_cache" in shapes else int(new["positions"].max()) + 1
        new["positions"] = _positions(new["positions"], rows, draw)
    if "input_ids" in new:
        new["input_ids"] = _tokens(new["input_ids"], shapes["weight"][0], draw)
    if "seeds" in new:
        new |= _requests(new, draw)
    return new


def _order(count: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randperm(count, generator=draw)


def _routing(values: Values, experts: int, draw: torch.Generator) -> Values:
    """Experts with other names, chosen by other tokens in other combinations; their loads hardly change."""
    ids = values["topk_ids"].long()
    tokens, topk = ids.shape
    order = _order(tokens, draw)
    ids = ids[order]
    for _ in range(PASSES * topk):
        ids = _exchanged(ids, draw)
    ids = _moved(ids, experts, draw)
    valid = (ids >= 0) & (ids < experts)
    ids = torch.where(valid, _order(experts, draw)[ids.clamp(0, experts - 1)], ids)
    made: Values = {"topk_ids": ids.to(values["topk_ids"].dtype)}
    if (weights := values.get("topk_weights")) is not None:
        weights = weights[order]
        noise = 1 + JITTER * (2 * torch.rand(weights.shape, generator=draw) - 1)
        total = weights.sum(1, keepdim=True)
        turned = weights * noise
        made["topk_weights"] = (turned * (total / turned.sum(1, keepdim=True).clamp(min=1e-30))).to(
            weights.dtype
        )
    return made


def _exchanged(ids: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Pairs of tokens exchange one of their experts each, if none of them then has an expert twice."""
    tokens, topk = ids.shape
    half = tokens // 2
    if not half:
        return ids
    order = _order(tokens, draw)
    a, b = order[:half], order[half : 2 * half]
    i, j = (torch.randint(topk, (half,), generator=draw) for _ in range(2))
    mine, theirs = ids[a, i], ids[b, j]
    fine = ~(ids[a] == theirs[:, None]).any(1) & ~(ids[b] == mine[:, None]).any(1)
    made = ids.clone()
    made[a[fine], i[fine]], made[b[fine], j[fine]] = theirs[fine], mine[fine]
    return made


def _moved(ids: torch.Tensor, experts: int, draw: torch.Generator) -> torch.Tensor:
    """Some tokens get another expert for one of theirs. The same number of experts have a token."""
    tokens, topk = ids.shape
    rows = (torch.rand(tokens, generator=draw) < MOVED).nonzero().flatten()
    if not len(rows):
        return ids
    at = torch.randint(topk, rows.shape, generator=draw)
    new = ids.flatten()[torch.randint(ids.numel(), rows.shape, generator=draw)]
    old = ids[rows, at]
    usable = (old >= 0) & (old < experts) & (new >= 0) & ~(ids[rows] == new[:, None]).any(1)
    loads, leaving = (
        torch.bincount(x[(x >= 0) & (x < experts)], minlength=experts) for x in (ids.flatten(), old)
    )
    usable &= (loads - leaving)[old.clamp(0, experts - 1)] > 0
    made = ids.clone()
    made[rows[usable], at[usable]] = new[usable]
    return made


def _cache(values: Values, shape: tuple[int, ...], draw: torch.Generator) -> Values:
    """Blocks with other numbers, sequences in another order and with other ends in their last blocks."""
    blocks, size = shape[:2]
    number = _renumbered(blocks, draw)
    made: Values = {}
    if (slots := values.get("slot_mapping")) is not None:
        inside = slots.clamp(min=0)
        made["slot_mapping"] = torch.where(
            slots >= 0, number[inside // size] * size + inside % size, slots
        ).to(slots.dtype)
    if (table := values.get("block_table")) is None:
        return made
    lens, starts = values["seq_lens"].long(), values.get("cu_seqlens_q")
    order = _order(len(lens), draw)
    queries = torch.ones_like(lens) if starts is None else starts.long().diff()
    lens, queries = lens[order], queries[order]
    if starts is not None:
        made["cu_seqlens_q"] = torch.cat([torch.zeros(1, dtype=torch.long), queries.cumsum(0)]).to(
            starts.dtype
        )
    first = (lens - 1).clamp(min=0) // size * size + 1  # of the last block
    ends = first + (torch.rand(lens.shape, generator=draw) * size).long().clamp(max=size - 1)
    longest = int(values.get("max_seqlen_k", lens.max()))
    ends = torch.maximum(ends.clamp(max=longest), queries)
    made["seq_lens"] = torch.where((lens > 0) & (lens < longest), ends, lens).to(values["seq_lens"].dtype)
    inside = (table >= 0) & (table < blocks)
    made["block_table"] = torch.where(inside, number[table.clamp(0, blocks - 1).long()], table)[order].to(
        table.dtype
    )
    return made


def _renumbered(blocks: int, draw: torch.Generator) -> torch.Tensor:
    """A new number for each block except 0, which padding uses. Most neighbors stay neighbors, as in a real cache."""
    number = torch.arange(blocks)
    if blocks < 3:
        return number
    number[1:] = 1 + (number[1:] - 1 + int(torch.randint(blocks - 1, (1,), generator=draw))) % (blocks - 1)
    chosen = 1 + _order(blocks - 1, draw)[: max(2, int(SWAPPED * blocks))]
    number[chosen] = number[chosen[_order(len(chosen), draw)]]
    return number


def _slots(slots: torch.Tensor, rows: int, draw: torch.Generator) -> torch.Tensor:
    """Other rows of a state with so many, of which 0 is for padding; padding stays."""
    used = slots > 0
    made = slots.clone()
    made[used] = 1 + _order(rows - 1, draw)[: int(used.sum())].to(slots.dtype)
    return made


def _positions(positions: torch.Tensor, rows: int, draw: torch.Generator) -> torch.Tensor:
    """Each run of successive positions begins elsewhere, and the runs have another order."""
    flat = positions.reshape(-1, positions.shape[-1])[0].long()
    breaks = (flat.diff() != 1).nonzero().flatten() + 1
    runs = list(torch.tensor_split(flat, breaks))
    made = []
    for i in _order(len(runs), draw).tolist():
        room = min(rows - len(runs[i]), 2 * int(flat.max()) + 1)
        start = int(torch.randint(room + 1, (1,), generator=draw)) if room > 0 else int(runs[i][0])
        made.append(torch.arange(start, start + len(runs[i])))
    return torch.cat(made).expand(positions.shape).to(positions.dtype).contiguous()


def _tokens(ids: torch.Tensor, vocabulary: int, draw: torch.Generator) -> torch.Tensor:
    """Other tokens, in another order, that repeat as the recorded ones do."""
    distinct, which = ids.flatten().unique(return_inverse=True)
    inside = (distinct >= 0) & (distinct < vocabulary)
    other = _order(vocabulary, draw)[: len(distinct)]
    named = torch.where(inside, other, distinct) if len(other) == len(distinct) else distinct
    return named[which][_order(ids.numel(), draw)].view(ids.shape).to(ids.dtype)


def _requests(values: Values, draw: torch.Generator) -> Values:
    """The requests of a batch in another order, with other seeds, further on or less far."""
    count = len(values["seeds"])
    order = _order(count, draw)
    made = {n: v[order] for n, v in values.items() if isinstance(v, torch.Tensor) and v.shape[:1] == (count,)}
    made["seeds"] = torch.randint(1 << 31, (count,), generator=draw).to(values["seeds"].dtype)
    if "offsets" in values:
        most = 2 * int(values["offsets"].max()) + 16
        made["offsets"] = torch.randint(most, (count,), generator=draw).to(values["offsets"].dtype)
    return made
