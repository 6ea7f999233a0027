"""Helpers for code that launches kernels: integer sizes, the device's limits, and split counters."""

from __future__ import annotations

import threading
from functools import lru_cache

import torch


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. triton.cdiv also works inside kernels, and that wrapper is slow on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a CUDA device; on other devices, an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program may have on a CUDA device; on other devices, an H200's."""
    if device.type != "cuda":
        return 232_448
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """The handle of the device's current stream, without the object that torch.cuda.current_stream makes of it."""
    if _RAW_STREAM is None or device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(_RAW_STREAM(device.index))


class Tickets:
    """Counters, initially zero, of the splits of a tile that have arrived. Kernels reset them to zero.

    Launches may share counters only if they cannot run at the same time. Each stream therefore has its own, and so
    does every captured launch, permanently: its graph may be replayed on any stream. Launches outside of captures, such
    as a graph's warm-up, allocate the counters for captures in blocks, a new block when less than half is left. If a
    capture still uses them up, it gets new ones that the graph itself sets to zero, at the cost of one more node.
    """

    STREAM, CAPTURED = 1 << 14, 1 << 20

    def __init__(self) -> None:
        self.streams: dict[tuple[torch.device, int], torch.Tensor] = {}
        self.captured: dict[torch.device, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []  # used-up blocks, which graphs still refer to
        self.lock = threading.Lock()

    def get(self, device: torch.device, count: int) -> torch.Tensor:
        if device.type != "cuda":
            return torch.zeros(count, dtype=torch.int32, device=device)
        if torch.cuda.is_current_stream_capturing():
            # Aligned to 16 bytes, like those of streams: Triton then compiles no second kernel.
            count = cdiv(count, 32) * 32
            with self.lock:
                left = self.captured.get(device)
                if left is not None and left.numel() >= count:
                    self.captured[device] = left[count:]
                    return left[:count]
            return torch.zeros(count, dtype=torch.int32, device=device)
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        found = self.streams.get(key)
        if found is None or found.numel() < count:
            with self.lock:
                size = max(count, self.STREAM)
                self.streams[key] = found = torch.zeros(size, dtype=torch.int32, device=device)
        if self._few(device):
            with self.lock:
                if self._few(device):
                    self.kept += [self.captured[device]] if device in self.captured else []
                    self.captured[device] = torch.zeros(self.CAPTURED, dtype=torch.int32, device=device)
        return found

    def _few(self, device: torch.device) -> bool:
        left = self.captured.get(device)
        return left is None or left.numel() < self.CAPTURED // 2


tickets = Tickets()
