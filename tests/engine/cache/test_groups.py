"""Groups of layers by window: their blocks, and how many fit into a memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkernels.core.layer_state import KVSpec
from fastkernels.engine.cache.blocks import BlockManager, BlockNames, hash_block, known_prefix
from fastkernels.engine.cache.kv_cache import block_bytes, fitting_blocks, group_blocks, groups_of
from fastkernels.engine.options.config import EngineConfig

CONFIG = EngineConfig(model="", block_size=16, max_num_seqs=4, max_num_batched_tokens=64)


def layers(*windows: int | None) -> list[Any]:
    def new_cache(n: int, size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        return [torch.empty(n, size, 2, 8, dtype=dtype, device=device)] * 2

    return [SimpleNamespace(keeps=KVSpec(w), new_cache=new_cache) for w in windows]


def test_window_as_long_as_the_context_is_none() -> None:
    groups = groups_of(layers(64, None, 4096, 16, 64), 4096)
    assert [(group.window, len(group.layers)) for group in groups] == [(None, 2), (64, 2), (16, 1)]
    # blocks of a window of 64 tokens: four, three more, those of a step of 64 tokens, and block 0
    assert group_blocks(groups, 1000, CONFIG) == [1000, 4 * 7 + 4 + 1, 4 * 4 + 4 + 1]
    assert group_blocks(groups, 30, CONFIG) == [30, 30, 21]


@pytest.mark.parametrize("num_bytes", [0, 10_000, 300_000, 5_000_000])
def test_fitting_blocks_fill_the_memory(num_bytes: int) -> None:
    groups = groups_of(layers(None, 64, 64, 64), 4096)
    sizes = [block_bytes(group.layers, 16, torch.float32) for group in groups]

    def total(blocks: int) -> int:
        return sum(n * size for n, size in zip(group_blocks(groups, blocks, CONFIG), sizes, strict=True))

    found = fitting_blocks(groups, num_bytes, CONFIG, torch.float32)
    assert found == 0 or total(found) <= num_bytes
    assert total(found + 1) > num_bytes
    assert num_bytes < 5_000_000 or found > 3 * num_bytes // sum(sizes)  # windows leave memory to the others


def test_prefix_needs_only_blocks_that_a_window_sees() -> None:
    """A window of 5 tokens sees the last block of four tokens before the next one."""
    names: list[bytes] = []
    for i in range(6):
        names.append(hash_block(names[-1] if names else b"", [i] * 4))
    groups = [BlockManager(20, 4), BlockManager(20, 4, window=5)]
    tables: list[list[int]] = [[], []]
    for group, table in zip(groups, tables, strict=True):
        group.grow(table, 24)
    for i in range(6):
        groups[0].name(tables[0][i], names[i])
    for i in (0, 2, 3):
        groups[1].name(tables[1][i], names[i])
    assert known_prefix(groups, names) == 4
    assert groups[1].find(names[:4]) == [0, 0, 0, tables[1][3]]
    assert known_prefix(groups, names[:2]) == 1
    assert groups[1].find(names[:1]) == [tables[1][0]]


def test_names_of_spans_equal_those_of_their_blocks() -> None:
    """A sequence is named in parts, with media, and again: a span that is known is looked up, not hashed."""
    kept, tokens = BlockNames(4), [i * 7919 % 1000 for i in range(4 * 200)]
    read: list[tuple[int, int]] = []

    def part(start: int, stop: int) -> list[int]:
        return tokens[start:stop]

    def media(start: int, stop: int) -> bytes:
        read.append((start, stop))
        return b"image" if start < 300 < stop else b""

    def named(parts: list[int], root: bytes = b"") -> list[bytes]:
        names: list[bytes] = []
        for num_blocks in parts:
            kept.extend(names, num_blocks, root, part, media)
        return names

    want = [b""]
    for at in range(0, len(tokens), 4):
        want.append(hash_block(want[-1], part(at, at + 4), media(at, at + 4)))
    assert named([200]) == named([3, 3, 64, 190, 200]) == want[1:]
    read.clear()
    assert named([200]) == want[1:] and len(read) < 10  # three spans of 64, and a rest of 8
    assert named([200], b"salt")[199] != want[200]
    tokens[399] += 1
    changed = named([200])
    assert changed[:99] == want[1:100] and not set(changed[99:]) & set(want)


def test_few_spans_are_kept() -> None:
    kept, names = BlockNames(1), list[bytes]()
    kept.MOST = 2
    kept.extend(names, 5 * kept.SPAN, b"", lambda start, stop: range(start, stop), lambda start, stop: b"")
    assert len(names) == 5 * kept.SPAN and len(kept._spans) == 2
