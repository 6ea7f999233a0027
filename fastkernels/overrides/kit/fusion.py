"""When an op that fuses others runs in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastkernels.core.dispatch import Op


def fuses(fusion: Op, apart: Sequence[Op], x: torch.Tensor) -> bool:
    """Return whether `fusion` runs instead of the ops `apart`: on a GPU or by request, if none of them is requested."""
    named = fusion.requested == "named"
    return named or (x.is_cuda and not fusion.requested and not any(op.requested for op in apart))
