"""Sends half of the bytes: the sum is computed in bfloat16."""

import torch
import torch.distributed as dist

from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    out = x.to(torch.bfloat16).contiguous()
    dist.all_reduce(out, group=parallel.communicator(group).process_group)
    return out.to(x.dtype)
