"""Programmatic dependent launch: a kernel starts while the kernel before it still runs (Hopper and later)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST = 4096  # programs of a launch that starts early (H200)


@triton.jit
def follow(OVERLAP: tl.constexpr):
    if OVERLAP:  # before any memory access: wait for the kernels before this one
        gdc_launch_dependents()
        gdc_wait()


@lru_cache
def overlaps(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlap(device: torch.device, grid: tuple[int, ...] = (), early: bool = True) -> dict[str, bool]:
    early = early and math.prod(grid) <= MOST and overlaps(device)
    return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    few = torch.Size(grid).numel() <= 4096  # larger launches gain nothing from an early start (H200)
    early = few and args[0].is_cuda and torch.cuda.get_device_capability(args[0].device)[0] >= 9
    kernel[grid](*args, **constants, OVERLAP=early, **({"launch_pdl": True} if early else {}))
