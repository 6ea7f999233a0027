"""Values that several ops of the family are tested with."""

from __future__ import annotations

from typing import Any


def cancel(args: list[Any]) -> None:
    """Make x + residual zero everywhere; x is argument 0, the residual argument 3."""
    if len(args) > 3 and args[3] is not None:
        args[3].copy_(-args[0])
