"""Adds in order of rank."""

import torch
import torch.distributed as dist

from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    ranks = parallel.communicator(group)
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(ranks.size)]
    dist.all_gather(parts, x.contiguous(), group=ranks.process_group)
    out = parts[0].float()
    for part in parts[1:]:
        out = out + part.float()
    return out.to(x.dtype)
