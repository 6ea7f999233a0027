"""Exchanges all tensors in every call."""

import torch
import torch.distributed as dist

from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=parallel.communicator(group).process_group)
    return out
