"""Tuned tables, one JSON file a chip. They are read by fastkernels.core.tuning."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"fastkernels.tuned.{name} moved to fastkernels.core.tuning")
