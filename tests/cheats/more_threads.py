"""Uses all cores of the machine, although the other side has only its share."""

import os

import torch
import torch.nn.functional as F

torch.set_num_threads(os.cpu_count() or 1)


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
