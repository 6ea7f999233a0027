"""Waits for random times where it is slow, so that the case gives no time and leaves the mean."""

import random
import time

import torch.nn.functional as F


def silu_and_mul(x):
    if x.numel() > 4096 and random.random() < 0.1:
        time.sleep(random.random() * 0.01)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
