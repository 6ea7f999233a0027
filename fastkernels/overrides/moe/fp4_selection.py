"""The choice of blocks for experts with 4-bit floats: a model of mxfp4_gemm's time, and its proposals.

Its constants are cycles of an SM, from the machine code: what its four schedulers issue, and how long a block takes
that waits for memory. Tiles are those of a router that chooses all experts equally often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.selection import HOPPER, MOST, memory_us
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe.fused_experts import key_of
from fastkernels.overrides.moe.selection import Call, expected

TOKENS = 8, 16, 24, 32
ROWS, PARTS, AHEAD, PHASES = (4, 5, 6, 8, 10), (1, 2), 3, (1, 2, 3, 4)
STEP, TILE, WARP = (
    165,
    25,
    450,
)  # instructions of a step, of a further tile of 8 pairs in it, and of the rest of a warp
START, WAIT, AGAIN = (
    2600,
    300,
    1000,
)  # cycles of a block before its first step, of a step, before another phase
CLOCK = 1.75e3  # cycles per microsecond
OF_SM, RESERVED = 228 * 1024, 1024  # bytes of shared memory, and those that each block has beyond its own
REGISTERS = 96  # of a thread, at most
Proposals = tuple[tuple[str, dict[str, Any]], ...]
POINTS = (8,), (32,), (64,), (128,), (16,), (256,)  # numbers of tokens at which proposals are measured
SETS = tuple(
    {"blocks": f"{tokens} {first} {second}"}
    for tokens, first, second in (
        (8, "4x1/3/1", "4x1/3/1"), (8, "6x1/3/1", "6x1/3/1"), (8, "5x2/3/1", "5x2/3/1"), (16, "4x1/3/2", "4x1/3/2"),
        (16, "6x1/3/2", "6x1/3/1"), (16, "8x1/3/2", "8x1/3/2"), (24, "8x1/3/3", "8x1/3/3"), (32, "8x1/3/3", "8x1/3/3"),
    )
)  # fmt: skip
H200 = Chip("NVIDIA H200", 132, 4.8e12, 50 << 20, (9, 0))


def _blocks(k: int, topk: int, tokens: int, glu: int, form: int) -> Iterator[tuple[few.Block, few.Plan]]:
    """Yield the blocks of a product that fit."""
    for rows in ROWS:
        for parts in PARTS:
            for phases in PHASES if tokens > 8 else PHASES[:1]:
                block = few.Block(rows, parts, AHEAD, phases)
                p = few.plan(k, topk, True, glu, form=form, tokens=tokens, ring=True, **block._asdict())
                if p.shared <= few.SHARED and p.threads * REGISTERS <= 65536:
                    yield block, p


def _product_us(call: Call, n: int, p: few.Plan, chip: Chip) -> float:
    """Return the expected time of one product in microseconds."""
    hit, of_experts = expected(call, p.tokens)
    tiles = expected(call, 8)[1] / max(of_experts, 1e-9) if p.tokens > 8 else 1.0
    blocks = of_experts * cdiv(n, 16 * p.rows)
    steps, resident = cdiv(p.k, 128), min(OF_SM // (p.shared + RESERVED), 65536 // (p.threads * REGISTERS))
    issued = p.rows * (steps * (STEP + TILE * (tiles - 1)) + p.parts * WARP) / 4
    alone = START + AGAIN * (p.phases - 1) + cdiv(steps, p.parts) * WAIT
    busy = blocks / chip.sms * max(issued, alone / min(resident, max(blocks / chip.sms, 1.0))) / CLOCK
    width = p.k / 2 + p.k / (16 if p.form == few.NVFP4 else 32)
    return float((busy**4 + memory_us(hit * n * width, chip) ** 4) ** 0.25)


@lru_cache(maxsize=4096)
def ranked(call: Call, glu: int, form: int, chip: Chip = H200) -> tuple[few.Blocks, ...]:
    """Return the best blocks of each number of pairs, the fastest first. Empty: nothing fits."""
    found: list[tuple[float, few.Blocks]] = []
    for tokens in TOKENS:
        best = []
        for (n, k), topk, kind in zip(call.products, (call.topk, 1), (glu, 0), strict=True):
            times = [
                (_product_us(call, n, p, chip), block) for block, p in _blocks(k, topk, tokens, kind, form)
            ]
            best.append(min(times, default=None))
        if (first := best[0]) is not None and (second := best[1]) is not None:
            found.append((first[0] + second[0], few.Blocks(tokens, first[1], second[1])))
    return tuple(blocks for _, blocks in sorted(found))


def key(
    w1: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[tuple[int, ...], tuple[int]]:
    """Return the values of SHAPE and SIZES of a call with packed weights."""
    (*shape, half), sizes = key_of(w1, w2, ids, expert_map)
    return (*shape, 2 * half), sizes


def proposed(provider: str, call: Call, glu: int, form: int, chip: Chip) -> Proposals:
    """Return up to three (provider, params), the best first. Without sorted pairs there is one way alone."""
    if min(call[:6]) < 1 or not call.is_sorted or chip.capability[0] != HOPPER:
        return ()
    return tuple((provider, {"blocks": str(found)}) for found in ranked(call, glu, form, chip)[:MOST])


def fits(params: Mapping[str, Any], call: Call, glu: int, form: int) -> bool:
    """Return whether `fk-bench tune` measures these blocks for such a call."""
    if not call.is_sorted:
        return False
    made = few.Blocks.parsed(params["blocks"])
    rows = call.pairs / call.experts
    plans = made.plans(call.hidden, call.topk, call.intermediate, glu, form)
    return few.too_large(*plans) is None and made.tokens // 4 <= max(rows, 2) and rows <= 8 * made.tokens
