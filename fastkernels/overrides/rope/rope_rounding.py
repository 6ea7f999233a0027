"""Rounding of vLLM's CPU kernel for rotary embeddings, which our reference follows where that kernel is loaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def host_truncates() -> bool:
    """Return whether vLLM's CPU kernel is loaded in a build that truncates bfloat16 results instead of rounding them.

    Builds without AVX512-BF16 instructions truncate, for neox style only. We then do the same, so that outputs agree.
    """
    kernel = getattr(torch.ops._C, "rotary_embedding", None)
    return kernel is not None and _truncates(kernel)


@cache
def _truncates(kernel: Any) -> bool:
    # 1.75 * (1 + 2^-7) is three quarters of the way from the bfloat16 value 1.7578125 to the next.
    query = torch.full((1, 32), 1.75, dtype=torch.bfloat16)
    table = torch.tensor([1.0078125] * 16 + [0.0] * 16, dtype=torch.bfloat16)[None]
    try:
        kernel(torch.zeros(1, dtype=torch.int64), query, None, 32, table, True)
    except (RuntimeError, TypeError):  # other arguments in that version, or no CPU kernel in that build
        return False
    return bool((query == 1.7578125).all())


def truncate(x: torch.Tensor) -> torch.Tensor:
    """Convert float32 to bfloat16 by dropping the low 16 bits."""
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()
