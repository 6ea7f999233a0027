"""Scores of documents for queries: which belong together, and the cosine of their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def pairs(queries: Sequence[T], documents: Sequence[T]) -> list[tuple[int, int]]:
    """(query, document) of each score: one query and any number of documents, or as many of both. Raises ValueError."""
    if not queries or not documents:
        raise ValueError(
            f"at least one query and one document are needed, got {len(queries)} and {len(documents)}"
        )
    if len(queries) not in (1, len(documents)):
        raise ValueError(
            f"{len(queries)} queries and {len(documents)} documents: give one query, or as many as documents"
        )
    return [(i if len(queries) > 1 else 0, i) for i in range(len(documents))]


def cosine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The cosine of two vectors [H], as an array [1]."""
    length = np.linalg.norm(first) * np.linalg.norm(second)
    return np.array([first @ second / max(length, 1e-8)], np.float32)


def lexical_weights(ids: Sequence[int], weights: np.ndarray, special: Sequence[int] = ()) -> dict[int, float]:
    """{token id: its largest weight above 0}, without special tokens; ids and weights [tokens] belong together."""
    found: dict[int, float] = {}
    for token, weight in zip(ids, weights.tolist(), strict=True):
        if weight > found.get(token, 0.0) and token not in special:
            found[token] = weight
    return found
