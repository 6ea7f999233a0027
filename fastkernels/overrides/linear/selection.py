"""The terms of the linear kernels' time for the selection model, overrides/kit/selection.py, and their proposals."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit.selection import HOPPER, MOST, Candidate, memory_us, model, sm_us
from fastkernels.overrides.linear.kernels import skinny_linear_cuda as skinny
from fastkernels.overrides.linear.kernels import skinny_linear_triton as triton
from fastkernels.overrides.linear.kernels import tiled_linear_cuda as tiled
from fastkernels.overrides.linear.kernels import wgmma_linear_cuda as wgmma
from fastkernels.overrides.linear.kernels import wgmma_linear_fp8_cuda as wgmma_fp8
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK
from fastkernels.overrides.linear.kernels.skinny_linear_triton import MAX_TOKENS

Proposals = tuple[tuple[str, dict[str, Any]], ...]
# Sets of cuda-tiled for prompts. Of nine sets, the first was the fastest in most sizes of five models: 0.97 to 1.06
# times as fast as cuBLAS for 8,192 tokens in turn with it (H200, 2026-11-29), alone at most 1.02. Which one is the
# fastest for fewer tokens depends on how its tiles fill the last round of the SMs.
PROMPTS: tuple[dict[str, Any], ...] = (
    tiled.TALL,
    {"rows": 128, "columns": 256, "cooperate": True, "shares": "w", "cluster": 1},
    {"rows": 256, "columns": 192, "cooperate": True, "shares": "x", "cluster": 2},
    {"rows": 256, "columns": 128, "cooperate": True, "shares": "w", "cluster": 1},
    {"rows": 128, "columns": 160, "cooperate": False, "shares": "x", "cluster": 2},
    {"rows": 128, "columns": 128, "cooperate": False, "shares": "w", "cluster": 2},
)

# Microseconds of a column of K in a block, at least: tensor cores take 16 columns at once, whatever the tile's rows
COLUMN_US = 1e-3


def _wgmma_terms(p: wgmma.Plan, n: int, k: int, chip: Chip) -> tuple[float, ...]:
    """Return the terms of a plan for a weight [n, k] in 16-bit words."""
    rounds = -(-p.items // p.grid)  # items of the busiest block
    columns = rounds * k / p.splits
    x = sm_us(2 * columns * p.tokens)  # read once a tile
    split = float(p.splits > 1)
    return (
        1.0,
        max(memory_us(2 * n * k, chip), COLUMN_US * columns),
        x,
        x * p.ahead / p.stages,  # waits behind the first reads of the weight
        rounds,
        split,
        split * sm_us(8 * rounds * p.rows * p.tokens),  # sums of parts, written and read
    )


def _skinny_terms(p: dict[str, Any], m: int, n: int, k: int, chip: Chip) -> tuple[float, ...]:
    rounds = -(-n // (16 * p["groups"] * chip.sms))  # tiles of the busiest block
    tokens = skinny.token_tiles(m)
    again = 1 if skinny.x_units(p, tokens, k) else rounds  # reads of x
    all_sms, busiest = memory_us(2 * n * k, chip), sm_us(2 * rounds * 16 * p["groups"] * k)
    return (
        1.0,
        all_sms,
        busiest,
        busiest * (p["groups"] - 1),
        sm_us(2 * again * 8 * tokens * k),
        all_sms * (-k % p["block_k"]) / k,  # the last copies of a row are short
    )


@lru_cache(maxsize=4096)
def linear_candidates(m: int, n: int, k: int, chip: Chip) -> tuple[Candidate, ...]:
    """Return all sets of the CUDA C++ kernels that suit 16-bit x [m, k] and weight [n, k]."""
    found = []
    if min(m, n) < 1 or m > MAX_TOKENS:
        return ()
    if k % 8 == 0 and k >= 64:
        for p in wgmma.PARAMS:
            if wgmma.fits(p, m, k):
                plan = wgmma.plan(m, n, k, **p, sms=chip.sms)
                terms = _wgmma_terms(plan, n, k, chip)
                found.append(Candidate("cuda-wgmma", p, f"cuda-wgmma {plan.tokens}", terms, plan))
    for p in skinny.PARAMS:
        if skinny.fits(p, m, k):
            kind = f"cuda-skinny {8 * skinny.token_tiles(m)}"
            terms = _skinny_terms(p, m, n, k, chip)
            found.append(Candidate("cuda-skinny", p, kind, terms, p["groups"]))
    return tuple(found)


@lru_cache(maxsize=4096)
def linear_fp8_candidates(m: int, n: int, k: int, block: int, chip: Chip) -> tuple[Candidate, ...]:
    """Return all sets of cuda-wgmma-fp8 that suit float8 x [m, k] and weight [n, k] with scales of this granularity."""
    if min(m, n) < 1 or m > MAX_TOKENS or k % 16 or k < 2 * wgmma_fp8.WORDS:
        return ()
    found, of_blocks = [], block == BLOCK
    for p in wgmma_fp8.PARAMS:
        if wgmma_fp8.fits(p, m, k):
            plan = wgmma_fp8.plan(m, n, k, **p, blocks=of_blocks, sms=chip.sms)
            kind = f"cuda-wgmma-fp8 {plan.tokens}{' blocks' if of_blocks else ''}"
            terms = _wgmma_terms(plan, n, k // 2, chip)
            found.append(Candidate("cuda-wgmma-fp8", p, kind, terms, plan))
    return tuple(found)


def propose_linear(shape: tuple[Any, ...], sizes: tuple[int, ...], chip: Chip) -> Proposals:
    """Return up to three (provider, params) for `linear`, the best first."""
    (n, k, dtype), (m,) = shape, sizes
    if dtype not in (torch.float16, torch.bfloat16):
        return ()
    return _linear_of_prompts(m, n, k, chip) if m > MAX_TOKENS else _linear(m, n, k, chip)


@lru_cache(maxsize=4096)
def _linear_of_prompts(m: int, n: int, k: int, chip: Chip) -> Proposals:
    """Return the set that is the fastest for many tokens, and those that fill the SMs best."""
    if chip.capability[0] != HOPPER or m < tiled.LEAST or n % 32 or k % 8 or k < 64:
        return ()

    def cycles(p: dict[str, Any]) -> float:
        return tiled.cycles(tiled.plan(m, n, **p, sms=chip.sms), k, chip.sms)

    rest = sorted(PROMPTS[1:], key=cycles)
    return tuple(("cuda-tiled", dict(p)) for p in (PROMPTS[0], *rest)[:MOST])


@lru_cache(maxsize=4096)
def _linear(m: int, n: int, k: int, chip: Chip) -> Proposals:
    if chip.capability[0] == HOPPER:
        return model("linear").proposals(linear_candidates(m, n, k, chip))
    if min(m, n) < 1 or m > MAX_TOKENS or k < 8 or k % 8:
        return ()
    # Triton's kernel runs on other chips, where it was not measured: its default, then the sets that fill the SMs best.
    first = triton.choose(m, n, k, chip.sms)
    rest = sorted(
        (p for p in triton.PARAMS if triton.fits(p, m, k)), key=lambda p: -triton.busy(p, n, chip.sms)
    )
    return tuple(("triton-skinny", dict(p)) for p in (first, *(p for p in rest if p != first))[:MOST])


def propose_linear_fp8(shape: tuple[Any, ...], sizes: tuple[int, ...], chip: Chip) -> Proposals:
    """Return up to three (provider, params) for `linear_fp8`, the best first."""
    (n, k, block, _), (m,) = shape, sizes
    return _linear_fp8(m, n, k, block, chip) if chip.capability[0] == HOPPER else ()


@lru_cache(maxsize=4096)
def _linear_fp8(m: int, n: int, k: int, block: int, chip: Chip) -> Proposals:
    return model("linear_fp8").proposals(linear_fp8_candidates(m, n, k, block, chip))
