"""Two parts of a layer at the same time, on two streams of one GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

# A step with more tokens fills the GPU with either part.
MOST_TOKENS = 256


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def both(
    x: torch.Tensor, first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (first(), second()), which read x [T, H] and nothing that the other writes.

    Few tokens run concurrently, in CUDA graphs as well. All memory that `second` allocates belongs to its stream, which
    waits for the caller's before it is used again.
    """
    if not x.is_cuda or len(x) > MOST_TOKENS or torch.compiler.is_compiling():
        return first(), second()
    current, other = torch.cuda.current_stream(x.device), _stream(x.device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        second_result = second()
    first_result = first()
    current.wait_stream(other)
    return first_result, second_result
