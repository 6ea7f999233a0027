"""What code that launches kernels shares: sizes, how many multiprocessors there are, and tickets of parts."""

from __future__ import annotations

import threading
from functools import lru_cache

import torch


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is a wrapper for kernels, too, which takes longer than all else here."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n from 1 on."""
    return 1 << (n - 1).bit_length()


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; elsewhere those of an H200, for which sizes are chosen there."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class Tickets:
    """Zeros that say how many splits of a tile have arrived. The kernel leaves them as it found them.

    Two launches may share them if one cannot start before the other has ended. So each stream has its own, and so
    does each captured launch, for ever: its graph may be replayed on any stream. They are made before, by launches
    that are not captured, such as those that warm a graph up: in blocks, a new one where less than half is left. A
    capture that uses up all the same gets new ones, set to zero by the graph itself, which costs it one more node.
    """

    STREAM, CAPTURED = 1 << 14, 1 << 20

    def __init__(self) -> None:
        self.streams: dict[tuple[torch.device, int], torch.Tensor] = {}
        self.captured: dict[torch.device, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []  # of graphs: blocks that were used up
        self.lock = threading.Lock()

    def get(self, device: torch.device, count: int) -> torch.Tensor:
        if device.type != "cuda":
            return torch.zeros(count, dtype=torch.int32, device=device)
        if torch.cuda.is_current_stream_capturing():
            # All begin at 16 bytes, as those of streams: no kernel is made anew.
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
