"""The interface of robot policies, and the checks of the numbers that robots send.

Every model of the runner Act has these attributes and methods:

    keeps_dtype   whether dtype 'auto' keeps the checkpoint's dtype on a GPU, too
    chunk         (actions, numbers of each): what a forward pass returns
    num_actions   actions of an answer, unless a request has another number; at most chunk[0]
    num_steps     denoising steps by default; the models check other numbers in check_steps(steps)
    read(given)   the checked Observation of a request. Raises ValueError, whose message begins with "the input"
    noise(seed, steps)       what denoising begins with, as one row of a batch, a numpy array
    stack(observations)      {name: array of a batch}, padded to one shape
    forward(steps, noise, **arrays)   actions [B, *chunk]; for tensors of one shape the same operations, in one graph
    ready(folder, dummy)     is called once the weights are loaded; refresh() after weights or code have changed
"""

from __future__ import annotations

import base64
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Observation:
    """The checked input of one request, as a model reads it.

    arrays  by the names of the model's `stack`
    size    its share of a step's tokens
    group   observations of one group can be one batch
    """

    arrays: Mapping[str, np.ndarray]
    size: int
    group: tuple[int, ...] = ()


def check_fields(given: Any, known: Sequence[str]) -> None:
    """Raise ValueError for an input that is no table of these fields."""
    if not isinstance(given, Mapping):
        raise ValueError(f"the input must be an object with {', '.join(known)}, got {reprlib.repr(given)}")
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"the input has the unknown field {unknown[0]!r}; known: {', '.join(known)}")


def numbers(given: Any, name: str, shape: Sequence[int | None], what: str) -> np.ndarray:
    """A field of numbers in float32, of a shape whose None is any size of at least 1.

    given  nested lists, an array, or base64 of little-endian float32 numbers, if the shape says how many a row has
    what   the shape in words, for messages
    Raises ValueError, also for NaN, infinity, and numbers beyond float32.
    """
    if isinstance(given, str):
        found: Any = _decoded(given, name, shape, what)
    else:
        try:
            found = np.asarray(given, None if isinstance(given, np.ndarray) else np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the input needs `{name}`, {what}, got {reprlib.repr(given)}") from error
    if found.dtype.kind not in "fiu" or (not isinstance(given, str) and _has_other(given)):
        raise ValueError(f"the input needs `{name}`, {what}, got {reprlib.repr(given)}")
    fits = found.ndim == len(shape) and all(
        n is None or n == m for n, m in zip(shape, found.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"the input needs `{name}`, {what}, got numbers of shape {list(found.shape)}")
    if found.size == 0:
        raise ValueError(f"the input has an empty `{name}`: it needs {what}")
    wrong = ~(np.abs(found.astype(np.float64)) <= LARGEST)  # in float16, LARGEST is infinity
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"the input has {found[at]} in `{name}` at {list(at)}, which is no finite number in float32"
        )
    return np.ascontiguousarray(found, np.float32)


def _decoded(given: str, name: str, shape: Sequence[int | None], what: str) -> np.ndarray:
    try:
        data = base64.b64decode(given, validate=True)
    except ValueError as error:
        raise ValueError(f"the input has text as `{name}` that is not base64: {error}") from error
    row = 4 * math.prod(n for n in shape if n is not None)
    if len(data) % row or (None not in shape and len(data) != row):
        raise ValueError(
            f"the input has {len(data)} bytes of base64 as `{name}`: it needs {what}, 4 bytes each"
            f" (float32, little-endian), so a multiple of {row} bytes"
        )
    return np.frombuffer(data, "<f4").reshape([-1 if n is None else n for n in shape])


def _has_other(given: Any) -> bool:
    """Whether nested lists have true, false or text at their ends, which numpy takes as numbers."""
    if isinstance(given, (list, tuple)):
        return any(map(_has_other, given))
    return isinstance(given, (bool, str, bytes))
