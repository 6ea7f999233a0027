"""torch.compile as an agent: Inductor's code for the reference of each op, one graph for each shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fastkernels.core import registry
from fastkernels.core.baseline import inductor_compiled, provider

PACKAGE = "torch"


def ops() -> Iterable[str]:
    return registry.op_names()


def bind(folder: Path, op: str) -> Callable[..., Any]:
    """The op's reference, compiled at the first call with a shape."""
    return inductor_compiled(provider(op, "reference"))
