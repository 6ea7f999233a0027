"""Checks of the arguments of host functions and layers for mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch


def unsupported_argument(function: str, **arguments: Any) -> str | None:
    """Return the first argument that is set, as a reason, or None: those named here have no kernel of ours."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            given = name if isinstance(value, torch.Tensor) else f"{name}={value!r}"
            return f"{function}: {given} is not supported; use the host's own function"
    return None


def refuse(function: str, **arguments: Any) -> None:
    """Raise ValueError for the first argument that is set; see `unsupported_argument`."""
    if (reason := unsupported_argument(function, **arguments)) is not None:
        raise ValueError(reason)


def check_tokens(hidden_states: torch.Tensor, gating_output: torch.Tensor) -> None:
    """Raise ValueError unless a router's two inputs have the same number of tokens."""
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise ValueError(
            f"hidden_states has {hidden_states.shape[0]} tokens, gating_output {gating_output.shape[0]}"
        )
