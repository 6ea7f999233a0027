"""Only rank 0 gets the sum; the others return what they have."""

import torch
import torch.distributed as dist

from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    out = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(out, 0, group=parallel.communicator(group).process_group)
    return out
