"""Evenness of a router's load, and agreement of two sets of hot experts, from counts of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def counts_of(ids: np.ndarray, experts: int) -> np.ndarray:
    """ids: [T, K]. Returns the number of (token, choice) pairs of each expert [E]."""
    return np.bincount(np.asarray(ids).reshape(-1), minlength=experts)


def gini(counts: Sequence[float] | np.ndarray) -> float:
    """The Gini coefficient: 0 if all experts have the same load, (E - 1) / E if one has all of it."""
    x = np.sort(np.asarray(counts, dtype=float))
    if not x.sum():
        raise ValueError("no expert has a token")
    rank = np.arange(1, len(x) + 1)
    return float((2 * rank - len(x) - 1) @ x / (len(x) * x.sum()))


def load_stats(counts: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Statistics of the pairs of each expert [E]:

    max_over_mean  the hottest expert's load over the mean load
    cv             standard deviation over mean
    gini           see `gini`
    entropy        of the load, relative to its maximum log E: 1 if even, 0 if one expert has all
    hot_share      share of all pairs in the hottest eighth of the experts (at least one)
    hit            experts with any pair

    Raises ValueError if there is no pair.
    """
    x = np.asarray(counts, dtype=float)
    skew = gini(x)
    share = x / x.sum()
    there = share[share > 0]
    entropy = -float(there @ np.log(there)) / np.log(len(x)) if len(x) > 1 else 1.0
    hottest = np.sort(share)[::-1][: max(1, len(x) // 8)]
    return {
        "max_over_mean": float(share.max() * len(x)),
        "cv": float(x.std() / x.mean()),
        "gini": skew,
        "entropy": entropy,
        "hot_share": float(hottest.sum()),
        "hit": float((x > 0).sum()),
    }


def uniform_ids(tokens: int, experts: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """[T, K]: the experts of a token are distinct, and all sets of K are equally likely."""
    return rng.random((tokens, experts)).argpartition(top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def expected_hit(tokens: int, experts: int, top_k: int) -> float:
    """Expected number of experts that uniform routing of `tokens` tokens hits: E (1 - (1 - K / E) ** T)."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def hottest(counts: np.ndarray, n: int) -> set[int]:
    """The n experts with the highest load; ties go to the lower number."""
    return set(np.argsort(-np.asarray(counts, dtype=float), kind="stable")[:n].tolist())


def jaccard(a: set[int], b: set[int]) -> float:
    """Size of the intersection over size of the union."""
    return len(a & b) / len(a | b) if a | b else 1.0


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation, ties with their mean rank; 0 if one side is constant."""
    x, y = (_ranks(np.asarray(v, dtype=float)) for v in (a, b))
    x, y = x - x.mean(), y - y.mean()
    below = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / below if below else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[inverse]
