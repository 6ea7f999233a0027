"""The choice of blocks for experts with 4-bit floats, and proposals that a patch measures.

A block of more pairs decodes weights less often and takes longer. Blocks are counted for a router that chooses all
experts equally often.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit.selection import HOPPER, MOST
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe.fused_experts import key_of
from fastkernels.overrides.moe.selection import Call, expected

# Time of a block of so many pairs over that of one of 8, on an H200, 2026-11-30: with GPT-OSS-20B and Qwen3-30B at 64
# and 128 tokens 1.27 to 1.31 for 16 pairs; for 24 and 32, GPT-OSS-20B at 128 tokens alone.
TIMES = {8: 1.0, 16: 1.3, 24: 1.9, 32: 2.06}
AHEAD, PHASES = 3, (1, 2, 3, 4)
SHORT = 1024  # columns below which blocks of fewer rows were faster
OF_TWO = 228 * 512 - 1024  # bytes of shared memory of a block with which an SM has two
Proposals = tuple[tuple[str, dict[str, Any]], ...]
POINTS = (8,), (32,), (64,), (128,), (16,), (256,)  # numbers of tokens at which proposals are measured
SETS = tuple(
    {"blocks": f"{tokens} {first} {second}"}
    for tokens, first, second in (
        (8, "6x1/3/1", "8x1/3/1"), (8, "8x1/3/1", "8x1/3/1"), (16, "10x1/3/2", "10x1/3/2"), (16, "8x1/3/2", "8x1/3/2"),
        (16, "10x1/3/2", "6x1/3/1"), (24, "8x1/3/3", "8x1/3/3"), (32, "8x1/3/3", "8x1/3/3"),
    )
)  # fmt: skip


def _block(k: int, topk: int, tokens: int, glu: int, form: int) -> few.Block | None:
    """Return the block of a product, None if shared memory is too small for two on an SM."""
    if tokens == 8:
        rows = 6 if form == few.NVFP4 and k >= SHORT else 8
    else:
        rows = 8 if tokens > 16 else 10 if k >= SHORT else 6
    for phases in PHASES[: 1 if tokens == 8 else None]:
        block = few.Block(rows, 1, AHEAD, phases)
        p = few.plan(k, topk, True, glu, form=form, tokens=tokens, ring=True, **block._asdict())
        if p.shared <= OF_TWO:
            return block
    return None


@lru_cache(maxsize=4096)
def ranked(call: Call, glu: int, form: int) -> tuple[few.Blocks, ...]:
    """Return the blocks of each number of pairs, the fastest first. Empty: nothing fits."""
    found = []
    for tokens, time in TIMES.items():
        first, second = (
            _block(k, topk, tokens, kind, form)
            for (_, k), topk, kind in zip(call.products, (call.topk, 1), (glu, 0), strict=True)
        )
        if first is not None and second is not None:
            found.append((expected(call, tokens)[1] * time, few.Blocks(tokens, first, second)))
    return tuple(blocks for _, blocks in sorted(found))


def key(
    w1: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[tuple[int, ...], tuple[int]]:
    """Return the values of SHAPE and SIZES of a call with packed weights."""
    (*shape, half), sizes = key_of(w1, w2, ids, expert_map)
    return (*shape, 2 * half), sizes


def default(call: Call, glu: int, form: int) -> few.Blocks | None:
    """Return the blocks of a call with sorted pairs that no measurement chose; None: 8 pairs, weights in registers.

    With 8 pairs, registers were as fast as the ring, or faster. Blocks of more than 16 have not been the fastest yet.
    """
    found = [blocks for blocks in ranked(call, glu, form) if blocks.tokens <= 16]
    return found[0] if found and found[0].tokens > 8 else None


def plans(
    w1: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None, glu: int, form: int,
    text: str | None,
) -> list[few.Plan] | None:  # fmt: skip
    """Return the plans of a call with sorted pairs: those of a text, else the default's; None: see `default`."""
    (experts, here, topk, hidden, intermediate), (tokens,) = key(w1, w2, ids, expert_map)
    call = Call(experts, here, topk, hidden, intermediate, tokens)
    blocks = default(call, glu, form) if text is None else few.Blocks.parsed(text)
    return None if blocks is None else blocks.plans(call.hidden, call.topk, call.intermediate, glu, form)


def proposed(provider: str, call: Call, glu: int, form: int, chip: Chip, own: few.Blocks | None) -> Proposals:
    """Return up to three (provider, params), the best first. own: the call's default, which is left out."""
    if min(call[:6]) < 1 or not call.is_sorted or chip.capability[0] != HOPPER:
        return ()
    found = [blocks for blocks in ranked(call, glu, form) if blocks != own]
    return tuple((provider, {"blocks": str(blocks)}) for blocks in found[:MOST])


def fits(params: Mapping[str, Any], call: Call, glu: int, form: int) -> bool:
    """Return whether `fk-bench tune` measures these blocks for such a call."""
    if not call.is_sorted:
        return False
    made = few.Blocks.parsed(params["blocks"])
    rows = call.pairs / call.experts
    suited = made.tokens // 4 <= max(rows, 2) and rows <= 8 * made.tokens
    return suited and few.too_large(*made.plans(call.hidden, call.topk, call.intermediate, glu, form)) is None
