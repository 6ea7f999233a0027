"""Launches: a kernel starts while the kernel before it still runs (Hopper and later); counters of split tiles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

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
    few = torch.Size(grid).numel() <= 4096  # larger launches gain nothing from an early start (H200)
    early = early and few and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], *args: Any, any_grid: Any = True, **constants: Any
) -> None:
    few = torch.Size(grid).numel() <= 4096  # larger launches gain nothing from an early start (H200)
    early = few and args[0].is_cuda and torch.cuda.get_device_capability(args[0].device)[0] >= 9
    kernel[grid](*args, **constants, OVERLAP=early, **({"launch_pdl": True} if early else {}))


def only() -> bool:
    return False


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def shared_memory(device: torch.device) -> int:
    found = driver.active.utils.get_device_properties(device.index or 0) if device.type == "cuda" else {}
    return found.get("max_shared_mem", 232_448)


class Tickets:
    """Counters of a split tile, zero before each launch."""

    def get(self, device: torch.device, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)


tickets = Tickets()
