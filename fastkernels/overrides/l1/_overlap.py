"""Kernels that are launched while the one before still runs (programmatic dependent launch: Hopper and later).

A decode step is hundreds of kernels of a few microseconds, each of which would wait for the one before to end, for its
launch, and for its first instructions. A kernel whose first act is `follow` is on the chip by then, and lets the one
after it come as early. It may follow and precede any other kernel: what that one needs, it waits for.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastkernels.env import Environment

# Programs of a launch that starts early. A larger one is long and has little to gain, and waiting costs each program:
# GELU of 51,200 programs took a quarter longer than in turn.
MOST = 4096


@triton.jit
def follow(OVERLAP: tl.constexpr):
    # First of all, in every program: nothing may be read or written, and none may end, before all kernels before this
    # one have ended. A kernel that went ahead of one would let those after it, which wait for this one only, do so too.
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap(device: torch.device, grid: tuple[int, ...] = ()) -> dict[str, bool]:
    """Launch arguments of a Triton kernel that calls follow(OVERLAP).

    grid  the launch's: large ones start in turn
    """
    early = math.prod(grid) <= MOST and overlaps(device)
    return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels start early there: on Hopper and later, unless FASTKERNELS_OVERLAP=0."""
    if device.type != "cuda" or not Environment.read().overlap:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9
