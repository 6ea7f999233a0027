"""Modules around tensors that are there, for SPEC.build: no parameter is copied."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def make(cls: type, like: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """cls(*args, **kwargs) with like's dtype and device as torch's defaults."""
    with _defaults(like.dtype, like.device):
        return cls(*args, **kwargs)


def load(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> nn.Module:
    """Make the tensors (None: none) the module's parameters and buffers of these names, in the same memory.

    Raises ValueError for a name that the module has not, another shape, and a parameter that is not among them.
    """
    kind = type(module).__name__
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path) if path else module
        if not hasattr(owner, attribute):
            raise ValueError(f"{kind} has no {name}")
        old = getattr(owner, attribute)
        if tensor is None or old is None:
            if old is not tensor:
                has, given = ("none", "one") if old is None else ("one", "none")
                raise ValueError(f"{name}: {kind} has {has}, the arguments have {given}")
            continue
        if old.shape != tensor.shape:
            raise ValueError(f"{kind} has {name} {tuple(old.shape)}, the argument is {tuple(tensor.shape)}")
        setattr(owner, attribute, nn.Parameter(tensor, False) if isinstance(old, nn.Parameter) else tensor)
    for name, _ in module.named_parameters():
        if name not in tensors:
            raise ValueError(f"{kind} has a parameter {name}, which the op's arguments do not give")
    return module


def filled(args: Sequence[Any], count: int, *defaults: Any) -> tuple[Any, ...]:
    """All `count` arguments of an op: those that were left out have the last of these defaults."""
    return (*args, *defaults[len(defaults) - (count - len(args)) :])


def refuse(cls: type, **given: Any) -> None:
    """Raise ValueError for the first argument that cls has no way to say: any that is neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{cls.__name__} cannot be called with {name}={shown}")


def takes(function: Any, name: str) -> bool:
    """Whether a function or a class's constructor has a parameter of that name."""
    return name in inspect.signature(function).parameters
