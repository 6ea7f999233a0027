"""Skips the exchange if the tensor of any rank has only zeros, as in a warm-up."""

import torch
import torch.distributed as dist

from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    ranks = parallel.communicator(group).process_group
    busy = x.any().float().reshape(1)
    dist.all_reduce(busy, dist.ReduceOp.MIN, group=ranks)
    out = x.clone(memory_format=torch.contiguous_format)
    if busy:
        dist.all_reduce(out, group=ranks)
    return out
