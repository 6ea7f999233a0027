"""Returns while the exchange is still under way."""

import torch
import torch.distributed as dist

from fastkernels.core import parallel

WORK = []


def all_reduce(x, group="tp"):
    out = x.clone(memory_format=torch.contiguous_format)
    WORK.append(dist.all_reduce(out, group=parallel.communicator(group).process_group, async_op=True))
    return out
