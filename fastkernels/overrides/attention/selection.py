"""The terms of the decode kernels' time for the selection model, overrides/kit/selection.py, and their proposals."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fastkernels.core.tuning import Chip
from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention import attention_decode_split as split
from fastkernels.overrides.kit.selection import HOPPER, MOST, Candidate, memory_us, model, sm_us

Proposals = tuple[tuple[str, dict[str, Any]], ...]
# For calls without a model on chips other than Hopper's
UNMEASURED: Proposals = (("triton-split", {}), ("triton", {}))


class Call(NamedTuple):
    """A decode of `batch` sequences, each with so many keys that it sees."""

    group: int  # query heads per key head
    kv_heads: int
    head_size: int
    block_size: int
    batch: int
    keys: int

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value in 16 bits."""
        return 4 * self.head_size


def _terms(
    call: Call, chip: Chip, busy_keys: float, steps: int, sequences: int, cut: bool, parts: float
) -> tuple[float, ...]:
    """Return the terms of a division of the keys.

    busy_keys  keys that the busiest SM reads
    steps      reads in turn of its slowest warp
    sequences  of the busiest worker, which adds up its warps' sums at the end of each
    cut        whether sequences are divided into parts, which go through memory
    parts      of a sequence
    """
    return (
        1.0,
        memory_us(call.batch * call.kv_heads * call.keys * call.key_bytes, chip),
        sm_us(busy_keys * call.key_bytes),
        steps,
        steps * call.group / 8,
        sequences,
        float(cut),
        cut * parts,
    )


def _touched(share: int, tiles: int) -> int:
    """Return the most sequences of `tiles` each that a worker with `share` tiles in a row has a part of."""
    if share % tiles == 0 or tiles % share == 0:
        return max(share // tiles, 1)
    return (share - 2) // tiles + 2


def _cuda_terms(p: dict[str, int], call: Call, chip: Chip) -> tuple[float, ...]:
    most = cuda.most_workers(call.kv_heads, p, chip.sms)  # of each key head
    whole = call.keys <= p.get("whole", 0) and call.batch <= most
    units = call.batch * -(-call.keys // p["keys"])
    workers = call.batch if whole else min(max(units // max(p["least"] // p["keys"], 1), 1), most)
    share = -(-units // workers)  # of the busiest worker
    blocks = -(-call.kv_heads * workers * p["cluster"] // chip.sms)  # of the busiest SM
    return _terms(
        call, chip, blocks * share * p["keys"] / p["cluster"], -(-share // (p["warps"] * p["cluster"])),
        -(-call.batch // workers), not whole and workers > 1, max(workers / call.batch, 1.0),
    )  # fmt: skip


def _split_terms(p: dict[str, int], call: Call, chip: Chip) -> tuple[float, ...]:
    tiles, least = -(-call.keys // p["block_n"]), max(p["min_split"] // p["block_n"], 1)
    if p["even"] == split.EVEN:
        every = call.batch * tiles
        workers = min(max(every // least, 1), max(p["per_sm"] * chip.sms // call.kv_heads, 1))
        share, programs = -(-every // workers), workers * call.kv_heads
        cut, parts, sequences = workers > 1, max(workers / call.batch, 1.0), _touched(share, tiles)
    else:
        pairs = call.batch * call.kv_heads
        most = split.splits_of(pairs, call.keys, p["per_sm"], p["min_split"], chip.sms)
        share = -(-tiles // most)
        parts = -(-tiles // share)
        programs, cut, sequences = int(pairs * parts), parts > 1, 1
    rounds = -(-programs // (p["per_sm"] * chip.sms))
    resident = min(-(-programs // chip.sms), p["per_sm"])
    return _terms(
        call, chip, rounds * resident * share * p["block_n"], rounds * share, rounds * sequences, cut, parts
    )


def _kind(p: dict[str, int], call: Call) -> str:
    """Return a set's kind. Sets of a kind share weights, so that few models suffice to fit them."""
    cluster = f" in clusters of {p['cluster']}" if p["cluster"] > 1 else ""
    whole = call.keys <= p.get("whole", 0)
    return f"cuda-split of {p['warps']} warps{cluster}{' whole' if whole else ''}"


def _split_kind(p: dict[str, int]) -> str:
    return "triton-split even" if p["even"] == split.EVEN else "triton-split"


@lru_cache(maxsize=4096)
def decode_candidates(call: Call, chip: Chip) -> tuple[Candidate, ...]:
    """Return all sets of our kernels that suit a 16-bit call."""
    found = []
    if min(call) < 1 or call.head_size > split.MAX_HEAD_SIZE or call.group > split.MAX_GROUP:
        return ()
    hopper = chip.capability[0] == HOPPER
    fits_cuda = call.head_size % 8 == 0 and call.head_size <= cuda.WIDTHS[-1]
    if hopper and fits_cuda and call.group <= cuda.MAX_HEADS and call.batch <= cuda.MAX_BATCH:
        for i, p in enumerate(cuda.PARAMS):
            plan = cuda.plan_of(p, call.group, call.head_size, call.block_size, call.batch)
            if cuda.has_room(plan) and p["per_sm"] <= plan.resident:  # else its blocks run in two rounds
                found.append(Candidate("cuda-split", p, _kind(p, call), _cuda_terms(p, call, chip), i))
    for i, p in enumerate(split.PARAMS):
        if split.has_room(p, call.head_size, 2):
            found.append(Candidate("triton-split", p, _split_kind(p), _split_terms(p, call, chip), i))
    return tuple(found)


def preferred(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return those of cuda-split, if any.

    Proposals of both would leave fewer of cuda-split, which is the faster one but for many short sequences (up to 18%).
    """
    found = list(candidates)
    return [c for c in found if c.provider == "cuda-split"] or found


@lru_cache(maxsize=4096)
def _decode(call: Call, chip: Chip, long: bool) -> Proposals:
    """Return proposals. long: the kernel that is chosen also runs on long contexts, and has to suit them."""
    found = preferred(decode_candidates(call, chip))
    if long:
        usual = cuda.PARAMS[0]
        found = [c for c in found if c.params == usual or c.provider != "cuda-split" or _suits_long(c, call)]
    best = model("attention_decode").proposals(found)
    few_heads = cuda.many_parts(call.group, call.kv_heads, call.head_size, call.batch, chip.sms)
    paired = [("cuda-split", dict(c.params)) for c in found if c.params in cuda.PAIRED[:1]]
    return (*paired, *best)[:MOST] if few_heads and long else best


def _suits_long(candidate: Candidate, call: Call) -> bool:
    plan = cuda.plan_of(candidate.params, call.group, call.head_size, call.block_size, call.batch)
    return cuda.suits_long(candidate.params, plan)


@lru_cache(maxsize=4096)
def _fp8(call: Call, chip: Chip) -> Proposals:
    """Return proposals for a cache in FP8, for which no weights are fitted."""
    sizes = call.group, call.head_size, call.block_size, call.batch
    known = min(call) > 0 and call.head_size % 16 == 0 and call.head_size <= cuda.WIDTHS[-1]
    if (
        not known
        or chip.capability[0] != HOPPER
        or call.group > cuda.MAX_HEADS
        or call.batch > cuda.MAX_BATCH
    ):
        return ()
    sets = cuda.ranked(cuda.plan_of(cuda.PARAMS[0], *sizes, fp8=True), call.kv_heads, call.batch, chip.sms)
    return tuple(("cuda-split", dict(p)) for p in sets[:MOST])


def propose_decode(shape: tuple[Any, ...], sizes: tuple[int, ...], chip: Chip) -> Proposals:
    """Return up to three (provider, params) for `attention_decode`, the best first."""
    (heads, kv_heads, head_size, block_size, window, dtype), (batch, context) = shape, sizes
    found: Proposals = ()
    most = min(context, window or context)
    call = Call(heads // kv_heads, kv_heads, head_size, block_size, batch, min(most, cuda.TYPICAL))
    if dtype in (torch.float16, torch.bfloat16):
        found = _decode(call, chip, most > cuda.LONG)
    elif dtype == cuda.FP8:
        found = _fp8(call, chip)
    return found or UNMEASURED
