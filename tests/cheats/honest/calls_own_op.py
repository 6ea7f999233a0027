"""Registers its own op with torch.library, and calls that."""

import torch
import torch.nn.functional as F

LIBRARY = torch.library.Library("honest_candidate", "FRAGMENT")
LIBRARY.define("silu_and_mul(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "silu_and_mul", "CPU")
def _silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul(x):
    return torch.ops.honest_candidate.silu_and_mul(x)
