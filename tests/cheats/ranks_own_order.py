"""Adds the own tensor first, so that the bits of the sum differ between ranks."""

import torch
import torch.distributed as dist

from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    ranks = parallel.communicator(group)
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(ranks.size)]
    dist.all_gather(parts, x.contiguous(), group=ranks.process_group)
    out = parts.pop(ranks.rank).float()
    for part in parts:
        out = out + part.float()
    return out.to(x.dtype)
