"""A provider with parameters, as `fk-bench tune` compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Choice:
    """A provider with one of its sets of parameters; {} means the kernel's own default."""

    provider: str
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return " ".join([self.provider, *(f"{name}={value}" for name, value in self.params.items())])
