"""The number of multiprocessors, and zeroed counters for kernels that split a tile."""

from __future__ import annotations

import torch


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class Tickets:
    """Counters of a split tile, zero before each launch."""

    def get(self, device: torch.device, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)


tickets = Tickets()
