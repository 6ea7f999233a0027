"""The judge of kernels: candidate and baseline in processes of their own, inputs, clock and oracle outside both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fk_bench.kernels.judge.rows.judging import Judge, Options, judge_ops

__all__ = ["Judge", "Options", "judge_ops"]


def __getattr__(name: str) -> Any:
    """Imported at use: a runner's interpreter, which imports this package, may have torch and little else."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fk_bench.kernels.judge.rows import judging

    return getattr(judging, name)
