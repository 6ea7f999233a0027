"""The terms of the experts' time for the selection model, overrides/kit/selection.py, and their proposals.

Bytes and tiles are those expected of a router that chooses all experts equally often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch

from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit.selection import HOPPER, MOST, Candidate, memory_us, model, sm_us
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK
from fastkernels.overrides.moe.few_pairs import MOST_TOKENS, PARAMS
from fastkernels.overrides.moe.moe_tiles import LEAST, SHARED, Tiles, fits, parsed, sets

Proposals = tuple[tuple[str, dict[str, Any]], ...]
TRITON, FEW, TILED = "triton", "triton-few", "cuda-tiled-fp8"
# Operations per second of an SM's tensor cores in 16 bits, on an H200; in float8 they have twice as many
FLOPS = 989e12 / 132
DECODE = 64  # tokens up to which launches take a notable part of the time
REGISTERS, WARPS = 65536, 64  # of an SM


class Call(NamedTuple):
    """A call's sizes.

    here       the experts of this rank
    itemsize   bytes of a weight
    of_blocks  see moe_tiles.tiles_fp8
    """

    experts: int
    here: int
    topk: int
    hidden: int
    intermediate: int
    tokens: int
    itemsize: int = 2
    of_blocks: bool = False

    @property
    def pairs(self) -> int:
        return self.tokens * self.topk

    @property
    def is_sorted(self) -> bool:
        """Whether pairs are sorted, as sorted_pairs.sorts has it."""
        return self.here != self.experts or 4 * self.pairs > self.experts

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of an expert's two weights."""
        return (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)


@lru_cache(maxsize=4096)
def expected(call: Call, block_m: int) -> tuple[float, float]:
    """Return the expected numbers of experts that are read and of blocks of rows, at uniform routing."""
    if not call.is_sorted:
        return call.here * (1 - (1 - call.topk / call.experts) ** call.tokens), float(call.pairs)
    share, tokens = min(call.topk / call.experts, 1.0), call.tokens
    if share == 1.0:
        return float(call.here), float(call.here * -(-tokens // block_m))
    hit, blocks, first = 0.0, 0.0, 0
    middle, spread = tokens * share, math.sqrt(tokens * share * (1 - share))
    low, high = max(int(middle - 6 * spread), 0), min(int(middle + 6 * spread) + 2, tokens)
    for rows in range(low, high + 1):
        log = (
            math.lgamma(tokens + 1) - math.lgamma(rows + 1) - math.lgamma(tokens - rows + 1)
            + rows * math.log(share) + (tokens - rows) * math.log1p(-share)
        )  # fmt: skip
        first = -(-rows // block_m)
        hit, blocks = hit + math.exp(log) * (rows > 0), blocks + math.exp(log) * first
    return call.here * hit, call.here * blocks


def resident(t: Tiles, itemsize: int) -> int:
    """Return the programs that an SM runs at once, at least one: by shared memory, warps and registers."""
    registers = t.block_m * t.block_n + 64 * 32 * t.num_warps  # sums, and what else a thread has
    return max(min(SHARED // t.shared(itemsize), WARPS // t.num_warps, REGISTERS // registers), 1)


def _product(call: Call, t: Tiles, n: int, k: int, chip: Chip) -> tuple[float, ...]:
    """Return the terms of one product with these tiles."""
    hit, blocks = expected(call, t.block_m)
    programs = blocks * -(-n // t.block_n)
    at_once = resident(t, call.itemsize)
    rounds = max(programs / (chip.sms * at_once), 1.0)
    whole = math.ceil(rounds - 0.05)  # of the busiest SM
    share = min(at_once, max(programs / chip.sms, 1.0))  # programs of an SM in a round
    width = call.itemsize * k
    rate = FLOPS * 2 / call.itemsize
    # Tensor cores take 64 rows of the left operand on Hopper, and 16 in smaller tiles.
    rows = t.block_m if t.swap or t.block_m >= 64 else max(t.block_m, 16)
    work = 2e6 * rows * t.block_n * k * whole * share / rate
    return (
        memory_us(hit * n * width, chip),
        sm_us(t.block_n * width * whole * share),
        sm_us(t.block_m * width * whole * share),
        work,
        work * (not t.swap and t.block_m < 64),  # slower instructions
        work * call.of_blocks,  # products with the scales of each block
        whole * -(-k // t.block_k) / t.num_stages,  # waits of the pipeline
        whole * share * t.block_m * t.block_n * 1e-6,  # results
    )


@lru_cache(maxsize=65536)
def _terms(call: Call, first: Tiles, second: Tiles, chip: Chip) -> tuple[float, ...]:
    both = [_product(call, t, n, k, chip) for t, (n, k) in zip((first, second), call.products, strict=True)]
    # Activations between the products, and results before their sum
    between = memory_us(2 * call.pairs * (3 * call.intermediate + call.hidden), chip)
    return 1.0, between, *(a + b for a, b in zip(*both, strict=True))


def few_terms(call: Call, p: Mapping[str, int], chip: Chip) -> tuple[float, ...]:
    """Return the terms of few_pairs.py with a set of its parameters."""
    half = max(p["columns"] // 2, 1)
    width = [call.itemsize * k for _, k in call.products]
    first = -(-call.pairs * -(-call.intermediate // p["columns"]) // chip.sms) * 2 * p["columns"] * width[0]
    second = -(-call.tokens * -(-call.hidden // half) // chip.sms) * call.topk * half * width[1]
    hit, pairs = expected(call, 1)[0], call.pairs
    read = call.itemsize * 3 * call.hidden * call.intermediate
    return (
        1.0,
        memory_us(hit * read, chip),
        memory_us(max(pairs - hit, 0.0) * read, chip),  # again, partly from L2
        sm_us(first + second),
        -(-call.hidden // p["depth"]) + call.topk * -(-call.intermediate // (2 * p["depth"])),  # waits
    )


@lru_cache(maxsize=1024)
def candidates(call: Call, chip: Chip, tiles: tuple[str, ...] | None = None) -> tuple[Candidate, ...]:
    """Return the sets that suit a call: pairs of tiles for the two products, of one block_m each, and few_pairs.PARAMS.

    tiles: of these only; None: all
    """
    if min(call[:6]) < 1:
        return ()
    rows, found = call.pairs // call.experts, []
    known = [p["gate_up"] for p in sets(call.itemsize)] if tiles is None else tiles
    suited = [text for text in known if fits({"gate_up": text}, rows, call.of_blocks)]
    for first, second in product(suited, repeat=2):
        a, b = parsed(first), parsed(second)
        if a.block_m == b.block_m:
            kind = f"triton {'many' if a.block_m >= 64 else 'few'}"
            params = {"gate_up": first, "down": second}
            found.append(Candidate(TRITON, params, kind, _terms(call, a, b, chip), (first, second)))
    if call.itemsize == 2 and call.tokens <= MOST_TOKENS:
        for p in PARAMS:
            found.append(Candidate(FEW, p, FEW, few_terms(call, p, chip), tuple(p.values())))
    return tuple(found)


def propose_experts(shape: tuple[Any, ...], sizes: tuple[int, ...], chip: Chip) -> Proposals:
    """Return up to three (provider, params) for `fused_experts`, the best first."""
    *where, dtype = shape
    if dtype not in (torch.float16, torch.bfloat16):
        return ()
    return _proposed("fused_experts", Call(*where, *sizes), chip)


def propose_experts_fp8(shape: tuple[Any, ...], sizes: tuple[int, ...], chip: Chip) -> Proposals:
    """Return up to three (provider, params) for `fused_experts_fp8`, the best first."""
    *where, block, _, _ = shape
    call = Call(*where, *sizes)._replace(itemsize=1, of_blocks=block == BLOCK)
    return _proposed("fused_experts_fp8", call, chip)


@lru_cache(maxsize=4096)
def _proposed(op: str, call: Call, chip: Chip) -> Proposals:
    if min(call[:6]) < 1:
        return ()
    known = model(op)
    others = _not_modelled(call, FEW in known.weights)
    if chip.capability[0] != HOPPER:  # the kernel's own choice, which fits the shared memory of other chips
        return (*(each for each in others if each[0] != TILED), (TRITON, {}))[:MOST]
    every = candidates(call, chip, tuple(known.fitted["tiles"]))
    found = (*others, *_unlike(known.best(every, len(every)), MOST - len(others)))
    tiled = [params for name, params in found if name == TRITON]
    if call.tokens > DECODE or len(tiled) < 2 or (early := _early(tiled[0])) in tiled:
        return found
    return (*found[: MOST - 1], (TRITON, early))


def _early(params: dict[str, str]) -> dict[str, str]:
    """Return tiles whose products start while the kernel before them ends, of which the model knows nothing."""
    return {which: str(replace(parsed(text), early=True)) for which, text in params.items()}


def _not_modelled(call: Call, few_known: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return kernels without weights in the model that suit a call, to try in any case."""
    if not few_known and call.itemsize == 2 and call.tokens <= MOST_TOKENS and call.pairs <= call.experts:
        return [(FEW, dict(p)) for p in PARAMS[: 2 if call.tokens == 1 else 1]]  # few pairs share an expert
    return [(TILED, {})] if call.of_blocks and call.pairs >= LEAST * call.experts else []


def _unlike(best: list[Candidate], most: int) -> list[tuple[str, dict[str, Any]]]:
    """Return at most so many of these: the fastest, then those that differ most from it.

    The model's error is larger than the difference of similar tiles, so these are worth less than another block_m.
    """
    chosen = best[:1]
    for differs in (_rows, lambda c: next(iter(c.params.values())), lambda c: c.kernel):
        for candidate in best:
            if len(chosen) < most and differs(candidate) not in map(differs, chosen):
                chosen.append(candidate)
    return [(c.provider, dict(c.params)) for c in chosen]


def _rows(candidate: Candidate) -> int:
    """Return the rows of a candidate's tiles; 0: of few_pairs.py."""
    return parsed(candidate.params["gate_up"]).block_m if candidate.provider == TRITON else 0
