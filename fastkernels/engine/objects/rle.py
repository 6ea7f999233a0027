"""Masks as runs of pixels in columns, and COCO's compressed form of these, which pycocotools reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MOST_COUNTS = 1 << 20  # characters of a compressed mask that is read


def decode_runs(runs: Sequence[int], height: int, width: int) -> np.ndarray:
    """The mask [height, width] of runs in columns."""
    inside = np.arange(len(runs)) % 2 == 1
    return np.repeat(inside, runs).reshape(width, height).T


def coco_rle(runs: Sequence[int], size: tuple[int, int]) -> dict[str, Any]:
    """COCO's compressed form. size: width and height."""
    return {"size": [size[1], size[0]], "counts": compress(runs)}


def compress(runs: Sequence[int]) -> str:
    """Differences to the run before the last in groups of five bits, the lowest first, as characters from '0' on.

    Bit 5 of a character says that another one follows; the highest bit of the last group is the sign.
    """
    counts = np.asarray(runs, np.int64)
    rest = counts.copy()
    rest[3:] -= counts[1:-2]
    parts, unfinished = [], np.ones(len(rest), bool)
    while unfinished.any():
        group = rest & 31
        rest = rest >> 5
        more = np.where(group & 16, rest != -1, rest != 0)
        parts.append(np.where(unfinished, (group | (more << 5)) + 48, 0))
        unfinished = unfinished & more
    found = np.stack(parts, 1).ravel() if parts else np.zeros(0, np.int64)
    return bytes(found[found > 0].astype(np.uint8)).decode()


def expand(counts: str) -> np.ndarray:
    """The runs of `compress`. Raises ValueError."""
    codes = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - 48
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        raise ValueError("has counts that are no runs in COCO's form")
    last = (codes & 32) == 0
    ends = np.flatnonzero(last)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends + 1 - starts
    if lengths.max() > 8:
        raise ValueError("has counts with a run of more than 40 bits")
    shifts = np.arange(len(codes)) - np.repeat(starts, lengths)
    found = np.add.reduceat((codes & 31) << (5 * shifts), starts)
    found -= np.where(codes[ends] & 16, 1 << (5 * lengths), 0)
    for first in (1, 2):
        found[first::2] = np.cumsum(found[first::2])
    return found


def from_coco(given: Mapping[str, Any], size: tuple[int, int]) -> np.ndarray:
    """The mask [height, width] of COCO's compressed form. size: the width and height that it must have.

    Raises ValueError, whose message follows the name of the field.
    """
    height_width, counts = given.get("size"), given.get("counts")
    if set(given) != {"size", "counts"} or not isinstance(counts, str):
        raise ValueError("must have the fields size and counts, a text, as answers have them")
    if not isinstance(height_width, (list, tuple)) or list(height_width) != [size[1], size[0]]:
        raise ValueError(
            f"must have size [{size[1]}, {size[0]}], height and width of the image, got {height_width!r:.40}"
        )
    if len(counts) > MOST_COUNTS:
        raise ValueError(f"has counts of {len(counts)} characters, and at most {MOST_COUNTS} are possible")
    runs, pixels = expand(counts), size[0] * size[1]
    if runs.min() < 0 or runs.max() > pixels:  # before they are summed, which could overflow
        raise ValueError(
            f"has counts with a run of less than 0 or more than {pixels} pixels, which the image has"
        )
    if (total := runs.sum()) != pixels:
        raise ValueError(f"has counts of {total} pixels, and the image has {pixels}")
    return decode_runs(runs.tolist(), size[1], size[0])
