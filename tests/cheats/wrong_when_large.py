"""Right for up to 1 MiB, and wrong in the last element beyond."""

import torch.nn.functional as F


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    out = F.silu(gate) * up
    if x.nbytes > 1 << 20:
        out.view(-1)[-1] += 1
    return out
