"""The judge of kernels: candidate and baseline run in processes of their own; inputs, clock and oracle stay outside."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fk_bench.kernels.judge.rows.judging import Judge, judge_ops
    from fk_bench.kernels.judge.rows.options import Options

__all__ = ["Judge", "Options", "judge_ops"]


def __getattr__(name: str) -> Any:
    """Import at first use: the interpreter of a runner imports this package and may have little more than torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "options" if name == "Options" else "judging"  # the latter takes a second
    return getattr(import_module(f"{__name__}.rows.{module}"), name)
