"""attention_decode on the CPU, by PyTorch and in C++: unequal lengths, windows, strided caches, stale blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from fastkernels.overrides.attention import attention_decode
from fastkernels.overrides.attention.attention_decode_cpp import decode_cpp
from fastkernels.overrides.attention.attention_decode_cpu import PADDED, decode_sdpa

LENGTHS = {
    "one": [37],
    "equal": [48, 48, 48],
    "padded": [41, 33, 48, 40],
    "apart": [3, 5, 100, 1],
    "empty": [20, 0, 17],
    "all empty": [0, 0],
}


KERNELS = {"sdpa": decode_sdpa, "cpp": decode_cpp, "cpp in splits": partial(decode_cpp, splits=3)}


@pytest.mark.parametrize("decode", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window_left", [-1, 20, 0])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_stale_blocks_have_no_effect(
    lengths: list[int], window_left: int, dtype: torch.dtype, decode: Callable[..., torch.Tensor]
) -> None:
    """NaN in unused blocks and past the ends; the blocks of a row are in any order."""
    generator = torch.Generator().manual_seed(len(lengths))
    block_size, heads, columns = 8, 2, 14
    order = torch.randperm(64, generator=generator).int()
    block_table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    caches = [torch.full((64, block_size, heads, 16), float("nan"), dtype=dtype) for _ in range(2)]
    taken = 0
    for row, length in enumerate(lengths):
        for column in range(-(-length // block_size)):
            block = order[taken]
            taken += 1
            block_table[row, column] = block
            here = min(block_size, length - column * block_size)
            for cache in caches:
                cache[block, :here] = torch.randn(here, heads, 16, generator=generator).to(dtype)
    q = torch.randn(len(lengths), 6, 16, generator=generator).to(dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    clean = [cache.nan_to_num(0.0) for cache in caches]
    rest = (seq_lens, block_table.clamp(min=0), max(lengths), 0.25, window_left)
    expected = attention_decode.reference(q, *clean, *rest)
    strided = [torch.stack([cache, cache], 2)[:, :, 0] for cache in caches]
    for used in (caches, strided):
        found = decode(q, *used, seq_lens, block_table, max(lengths), 0.25, window_left)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_lengths_cover_both_ways() -> None:
    together = {name: len(n) * max(n) <= PADDED * sum(n) for name, n in LENGTHS.items()}
    assert together["padded"] and together["empty"] and not together["apart"]
