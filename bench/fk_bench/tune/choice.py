"""A provider with parameters, as `fk-bench tune` compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.verify import measure
from fastkernels.verify.measure import Point

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Choice:
    """A provider with one of its sets of parameters; {} means the kernel's own default."""

    provider: str
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return " ".join([self.provider, *(f"{name}={value}" for name, value in self.params.items())])


def point_of(name: str, shape: Mapping[str, Any], sizes: Mapping[str, int], longer: bool = False) -> Point:
    """The point of a shape as a table has it. longer: for its longer calls."""
    key = registry.get(name).op.key
    typed = (getattr(torch, shape[n]) if n.endswith("dtype") else shape[n] for n in key.shape)
    return Point(name, tuple(typed), tuple(sizes[n] for n in key.sizes), longer=longer)


def subject_of(name: str, choice: Choice) -> measure.Subject:
    """The call of an op with this choice."""
    provider = next(p for p in registry.get(name).op.providers if p.name == choice.provider)
    return measure.Subject(provider, choice.params)
