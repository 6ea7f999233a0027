"""FlashInfer's kernels as candidates: the calls that are a baseline of the judge, for each op that has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline, provider

PACKAGE = "flashinfer"


def ops() -> Iterable[str]:
    return [op for op in registry.op_names() if _baselines(op)]


def bind(folder: Path, op: str) -> Callable[..., Any]:
    """A function with the op's arguments. It refuses what the baseline refuses, and copies what that writes over."""
    reference, found = provider(op, "reference"), _baselines(op)
    signature = inspect.signature(reference)
    chosen: dict[Any, Baseline | str] = {}  # asking may synchronize, so the first call of a kind asks

    @wraps(reference)
    def call(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given = list(bound.args)
        key = tuple(_like(a) for a in given)
        if key not in chosen:
            reasons = [b.supports(*given) or b.fails(*given) for b in found]
            chosen[key] = next(
                (b for b, why in zip(found, reasons, strict=True) if why is None), str(reasons[0])
            )
        mine = chosen[key]
        if isinstance(mine, str):
            raise NotImplementedError(f"FlashInfer does not take this case: {mine}")
        for i in mine.overwrites:
            given[i] = given[i].clone()
        return mine.fn(*given)

    return call


def _like(argument: Any) -> Any:
    """The properties that decide whether a kernel takes an argument; of other objects, their class."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return argument if isinstance(argument, int | float | str | torch.dtype | None) else type(argument)


def _baselines(op: str) -> list[Baseline]:
    """Those of the library whose results are those of the op."""
    return [b for b in registry.baselines(op) if b.name.startswith(PACKAGE) and not b.differs]
