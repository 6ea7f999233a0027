"""Copies between the host's memory and the device's.

Small arrays are pinned first, and the copy runs on its own. Pinning 25 MB takes 5.5 ms, and a copy that the
driver stages itself 1.8 ms (H200). Results in fresh memory arrive at 1.3 GB/s, so they go through memory that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LARGE = 1 << 18  # bytes
PACKED = 16


def to_device(array: np.ndarray | torch.Tensor, device: torch.device, dtype: Any = None) -> torch.Tensor:
    """An array, or a tensor in the host's memory, on the device; dtype: of numpy."""
    if isinstance(array, np.ndarray):
        array = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
    if device.type == "cpu":
        return array
    array = array.contiguous()
    return (array if array.nbytes >= LARGE else array.pin_memory()).to(device, non_blocking=True)


def joined(arrays: Sequence[np.ndarray], device: torch.device, dtype: Any = None) -> torch.Tensor:
    """The rows of all arrays, on the device."""
    if device.type == "cpu" or len(arrays) == 1 or sum(a.nbytes for a in arrays) < LARGE:
        return to_device(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), device, dtype)
    parts = [torch.from_numpy(np.ascontiguousarray(a, dtype=dtype)) for a in arrays]
    made = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype, device=device)
    for part, into in zip(parts, made.split([len(p) for p in parts]), strict=True):
        into.copy_(part, non_blocking=True)
    return made


def packed(
    arrays: Sequence[np.ndarray], device: torch.device, dtype: Any
) -> tuple[torch.Tensor, list[slice]]:
    """Vectors as one vector on the device, in one copy, and where each is in it.

    Each begins at a multiple of PACKED elements: kernels that are compiled for aligned memory take it.
    """
    places, at = list[slice](), 0
    for array in arrays:
        places.append(slice(at, at + len(array)))
        at += -(-len(array) // PACKED) * PACKED
    joint = np.zeros(at, dtype)
    for array, place in zip(arrays, places, strict=True):
        joint[place] = array
    return to_device(joint, device), places


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array. Waits for it."""
    if tensor.device.type == "cpu" or tensor.nbytes < LARGE:
        return tensor.cpu().numpy()
    staged = tensor.to("cpu", non_blocking=True)  # in pinned memory, which PyTorch keeps
    torch.cuda.current_stream(tensor.device).synchronize()
    return staged.numpy().copy()
