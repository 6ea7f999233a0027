"""Concrete calls of an op, and how exact an op has to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One concrete call of an op: a binding of its axes.

    dims    sizes and options by name, as OpSpec.axes declares them; those that are left out have their defaults
    dtype   dtype of the tensors that declare none
    weight  how often production makes this call, relative to the op's other cases
    tags    'model' for shapes of real models (the benchmark), 'odd' for small and irregular ones (the tests)
    """

    name: str
    dims: Mapping[str, Any]
    dtype: str = "bfloat16"
    weight: float = 1.0
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tolerance:
    """|out - reference| <= atol + rtol * |reference|, elementwise."""

    atol: float
    rtol: float


TOLERANCE = {
    "float32": Tolerance(1e-5, 1e-5),
    "float16": Tolerance(2e-3, 2e-3),
    "bfloat16": Tolerance(1.6e-2, 1.6e-2),
}


def dtype_of(args: Sequence[Any], position: int | None = None) -> str:
    """Case.dtype of a call: that of the argument at `position`, else of the first floating-point tensor.

    Returns float32 for a call without floating-point tensors.
    """
    if position is not None:
        return str(args[position].dtype).removeprefix("torch.")
    for value in args:
        dtype = getattr(value, "dtype", None)
        if dtype is not None and getattr(dtype, "is_floating_point", False):
            return str(dtype).removeprefix("torch.")
    return "float32"
