"""Copies what the other ranks pass in shared memory."""

import torch

from fastkernels.core import parallel


def all_gather(x, group="tp"):
    return torch.cat(parallel.communicator(group).exchange("all_gather", x.contiguous()))
