"""Values that several ops of this family and experts share."""

from __future__ import annotations

import torch

from fastkernels.core.spec import Call


def placement(call: Call, experts: int, here: int) -> torch.Tensor:
    """Return a random expert_map [experts], int32, of which `here` are on this rank, in any order."""
    local = call.rand(experts).argsort()[:here]
    found = torch.full((experts,), -1, dtype=torch.int32, device=call.device)
    found[local] = torch.arange(len(local), dtype=torch.int32, device=call.device)
    return found
