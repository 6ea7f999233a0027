"""Samples of recommenders: readers of requests that give checked arrays, whole batches at once, and their scores."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

Place: TypeAlias = Callable[[np.ndarray], torch.Tensor]

Graphs: TypeAlias = Callable[[Hashable, Callable[..., Any], Sequence[torch.Tensor]], Any]  # of the runner


class Together(NamedTuple):
    """Scores of all samples in one tensor [sum of sizes, ...], in order."""

    scores: torch.Tensor
    sizes: Sequence[int]


class Best(NamedTuple):
    """The best items of all samples: scores and ids [samples, k], of which a sample has the first of `sizes`."""

    scores: torch.Tensor
    ids: torch.Tensor
    sizes: Sequence[int]


Scores: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor | None]] | Together | Best"


def fields(given: Any, known: Sequence[str]) -> None:
    """Raise ValueError for an input that is no table of these fields."""
    if not isinstance(given, Mapping):
        raise ValueError(f"the input must be an object with {', '.join(known)}, got {reprlib.repr(given)}")
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"the input has the unknown field {unknown[0]!r}; known: {', '.join(known)}")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def as_given(value: Any) -> Any:
    """A tensor as an array, one without dimensions as its number, and all else as it is."""
    value = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
    return value.item() if isinstance(value, np.ndarray) and not value.ndim else value


def integers(given: Any) -> np.ndarray | None:
    """An int64 array [n] of an integer, or of a list or an array of integers; None for anything else.

    It may be the given array.
    """
    if isinstance(given, np.ndarray):
        if given.ndim != 1 or given.dtype.kind not in "iu" or (given.dtype == np.uint64 and given.size):
            return None
        return given.astype(np.int64, copy=False)
    listed = given if isinstance(given, (list, tuple)) else (given,)
    if not {*map(type, listed)} <= {int}:
        return None
    try:
        return np.array(listed, np.int64)
    except OverflowError:
        return None


def ids_of(given: Any, what: str, count: int, where: str, dtype: Any = np.int64) -> np.ndarray:
    """One id, or a list of them, in an array of its own. Raises ValueError for what is no id of `where`.

    count: the ids of `where`, which dtype holds
    """
    given = as_given(given)
    found = integers(given)
    # As unsigned numbers, ids below 0 are large
    if found is not None and (not found.size or found.view(np.uint64).max() < count):
        return found.astype(dtype)
    listed = given.tolist() if isinstance(given, np.ndarray) else given
    listed = list(listed) if isinstance(listed, (list, tuple)) else [listed]
    for value in listed:
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise ValueError(f"the input has {reprlib.repr(value)} as an id of {what}, which is no integer")
        if not 0 <= value < count:
            raise ValueError(
                f"the input has the id {value} of {what}, and {where} has {count} rows: 0 to {count - 1}"
            )
    return np.array(listed, dtype)


def rows_of(
    given: Any, rows: int, what: str, count: int, where: str, dtype: Any = np.int64
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of several rows, one after the other, and how many each row has.

    given: [rows] ids, one for each row; [rows, n] ids; or a list with an id or a list of ids for each row
    """
    given = as_given(given)
    if not isinstance(given, (list, tuple, np.ndarray)) or len(given) != rows:
        got = f"{len(given)}" if isinstance(given, (list, tuple, np.ndarray)) else reprlib.repr(given)
        raise ValueError(f"the input has {rows} rows and needs as many entries in {what}, got {got}")
    if isinstance(given, np.ndarray):
        if given.ndim not in (1, 2):
            raise ValueError(
                f"the input has an array of {given.ndim} dimensions in {what}: it must be [rows] or [rows, n]"
            )
        each = given.shape[1] if given.ndim == 2 else 1
        return ids_of(given.ravel(), what, count, where, dtype), np.full(rows, each, np.int64)
    listed = [as_given(one) for one in given]
    sizes = np.array([len(o) if isinstance(o, (list, tuple, np.ndarray)) else 1 for o in listed], np.int64)
    flat = [value for o in listed for value in (o if isinstance(o, (list, tuple, np.ndarray)) else (o,))]
    return ids_of(flat, what, count, where, dtype), sizes
