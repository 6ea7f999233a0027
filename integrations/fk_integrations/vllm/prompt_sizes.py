"""Sizes of batches that a warm-up runs, so that later prompts of any size compile nothing.

Triton compiles a kernel again where an integer becomes a multiple of 16, and kernels choose their tiles by size. A few
batches larger than the CUDA graphs therefore stand for all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MOST_DENSE = (
    8192  # without experts, larger batches differ in nothing from the largest, which a warm-up runs anyway
)


def of(config: Any) -> list[int]:
    """The sizes for a VllmConfig, the same in all ranks."""
    most, last = config.scheduler_config.max_num_batched_tokens, 0
    if config.compilation_config.cudagraph_mode and config.compilation_config.max_cudagraph_capture_size:
        last = config.compilation_config.max_cudagraph_capture_size
    experts = config.model_config.get_num_experts()
    per_token = getattr(config.model_config.hf_text_config, "num_experts_per_tok", None) or 1
    return sizes(last, most, experts, per_token)


def sizes(last: int, most: int, experts: int = 0, per_token: int = 1) -> list[int]:
    """Numbers of tokens above `last`: the smallest of each kind."""
    seen: set[tuple[Any, ...]] = set()
    found = []
    for tokens in range(last + 1, (most if experts else min(most, MOST_DENSE)) + 1):
        kinds = {*(_of_experts(tokens, experts, per_token) if experts else _of_any(tokens))}
        if not kinds <= seen:
            seen |= kinds
            found.append(tokens)
    return found


def _of_any(tokens: int) -> Iterator[tuple[Any, ...]]:
    yield "size", tokens.bit_length() - (tokens.bit_count() == 1), tokens % 16 == 0


def _of_experts(tokens: int, experts: int, per_token: int) -> Iterator[tuple[Any, ...]]:
    """Kinds for which kernels of experts are compiled: vLLM's fused_moe, and those of triton_kernels 3.5.1."""
    yield from _of_any(tokens)
    power = 1 << ((tokens - 1).bit_length() - 1) if tokens > 1 else 1
    yield "tiles", power, tokens > power * 3 // 2  # fused_moe has tiles of each power of two and 3/2 of it
    rows, groups = tokens * per_token, -(-tokens // 128) * 4
    yield "chosen", power, tokens % 16 == 0, groups % 16 == 0
    yield "cleared", 2 * rows % 16 == 0, -(-tokens // 32) % 16 == 0, groups % 16 == 0
    yield "sorted", tokens % 16 == 0, groups % 16 == 0
    block = max(16, min(1 << (max(1, rows // experts) - 1).bit_length(), 128))
    blocks = rows if rows <= experts else -(-(rows - experts + 1) // block) + experts - 1
    yield "first product", block, tokens % 16 == 0, blocks % 16 == 0
    yield "second product", block, rows % 16 == 0, blocks % 16 == 0
