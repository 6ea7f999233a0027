"""Shared by ops on the cells of feature maps of several sizes, level after level, each row by row."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

MOST_LEVELS = 4  # that kernels take


def pairs(op: str, shapes: Sequence[int]) -> list[tuple[int, int]]:
    """(rows, columns) of each level from the flat list. Raises ValueError."""
    if not shapes or len(shapes) % 2 or min(shapes) < 1:
        raise ValueError(
            f"{op}: shapes must be rows and columns of each level, all above 0, got {list(shapes)}"
        )
    return list(zip(shapes[::2], shapes[1::2], strict=True))


def cells(shapes: Sequence[int]) -> int:
    """The number of cells of all levels."""
    return sum(rows * columns for rows, columns in zip(shapes[::2], shapes[1::2], strict=True))


def padded(shapes: Sequence[int]) -> list[int]:
    """rows and columns of MOST_LEVELS levels: those that there are, then 1 and 1."""
    return [*shapes, *[1] * (2 * MOST_LEVELS - len(shapes))]


@triton.jit
def size_of(level, H0, W0, H1, W1, H2, W2, H3, W3):
    """(rows, columns, first cell) of the level that each lane names."""
    h = tl.where(level == 0, H0, tl.where(level == 1, H1, tl.where(level == 2, H2, H3)))
    w = tl.where(level == 0, W0, tl.where(level == 1, W1, tl.where(level == 2, W2, W3)))
    second = H0 * W0
    third = second + H1 * W1
    start = tl.where(
        level == 0, 0, tl.where(level == 1, second, tl.where(level == 2, third, third + H2 * W2))
    )
    return h, w, start
