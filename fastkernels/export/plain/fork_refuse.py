"""Arguments that only the host's code supports."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.dispatch import Unsupported  # type: ignore[attr-defined]  # of fork.py


def refuse(function: str, **given: Any) -> None:
    """Raise Unsupported if an argument is given that the op does not have."""
    if any(value is not None and value is not False for value in given.values()):
        raise Unsupported(function)


def check_tokens(hidden_states: torch.Tensor, gating_output: torch.Tensor) -> None:
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise ValueError("hidden_states and gating_output differ in the number of tokens")
