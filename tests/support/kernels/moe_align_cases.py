"""Run both kernels of moe_align at boundary sizes under TRITON_INTERPRET=1; print one line of JSON per case."""

from __future__ import annotations

import itertools
import json

import torch

from fastkernels.overrides.routing import moe_align
from fastkernels.overrides.routing import moe_align_triton as kernels

# tokens, experts, choices, block size: around a chunk of 64, a piece of 128, a chunk of two pieces, and 32 bins
SIZES = (
    (0, 8, 2, 16), (1, 1, 1, 1), (21, 7, 3, 4), (64, 33, 1, 16), (65, 32, 2, 48), (350, 128, 2, 16), (300, 3, 1, 1),
    (700, 1030, 3, 8),
)  # fmt: skip
# (invalid_first, with an expert_map, entries that sorted_token_ids lacks)
VARIANTS = ((False, False, 0), (True, False, 0), (False, True, 5), (True, True, -300))


def routings(tokens: int, experts: int, choices: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=-1)[:, :choices].int()
    some, one = ids.long(), torch.full_like(ids, experts - 1)
    some[::3], some[1::5] = -1, experts
    some[2::7] += 1 << 32  # invalid, though its lower half is a valid id
    return {"random": ids, "one expert": one, "some of none": some}


def problem(
    way: str, ids: torch.Tensor, experts: int, block: int, first: bool, mapped: bool, less: int
) -> str:
    numbers = torch.arange(experts, dtype=torch.int32)
    here = torch.where(numbers % 2 == 0, numbers // 2, -1) if mapped else None
    capacity = max(moe_align.padded_size(ids.numel(), block, experts + first) - less, 0)
    want = moe_align.reference(ids, block, experts, capacity, here, first)
    got = moe_align._empty(ids, block, capacity)
    for out in got:
        out.fill_(-77)
    getattr(kernels, way)(ids, here, got, experts, block, first)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    wrong = [n for n, a, b in zip(names, got, want, strict=True) if not torch.equal(a, b)]
    return ", ".join(wrong)


def main() -> None:
    variants = itertools.cycle(VARIANTS)
    for tokens, experts, choices, block in SIZES:
        for routing, ids in routings(tokens, experts, choices).items():
            first, mapped, less = next(variants)
            # One program per expert reads all pairs: minutes in the interpreter.
            ways = ("by_experts", "by_chunks") if experts * ids.numel() < 50_000 else ("by_chunks",)
            for way in ways:
                case = f"{way} {tuple(ids.shape)} of {experts}, block {block}, {routing}, {first}, {mapped}, {less}"
                found = problem(way, ids, experts, block, first, mapped, less)
                print(json.dumps({"case": case, "problem": found}), flush=True)


if __name__ == "__main__":
    main()
