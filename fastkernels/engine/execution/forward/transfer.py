"""Copies between the host's memory and the device's.

Small arrays are pinned first, and the copy runs on its own. The driver stages larger ones, 10 MB in 1.3 ms. Inside of
STAGED, several threads copy pieces into pinned memory, which PyTorch keeps, while earlier ones travel: 39 MB take 2.7
ms, and the driver 5.9 (H200, 16 cores). Results in fresh memory arrive at 1.3 GB/s, so they go through such memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

LARGE = 1 << 18  # bytes
STAGED = range(1 << 24, 1 << 28)  # bytes of arrays that are staged here
PIECE = 1 << 22  # bytes that one thread copies
COPIERS = 4
PACKED = 16


def to_device(array: np.ndarray | torch.Tensor, device: torch.device, dtype: Any = None) -> torch.Tensor:
    """An array, or a tensor in the host's memory, on the device; dtype: of numpy."""
    if isinstance(array, np.ndarray):
        array = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
    if device.type == "cpu":
        return array
    array = array.contiguous()
    if array.nbytes in STAGED:
        return _staged([array], torch.empty_like(array, device=device))
    return (array if array.nbytes >= LARGE else array.pin_memory()).to(device, non_blocking=True)


def joined(arrays: Sequence[np.ndarray], device: torch.device, dtype: Any = None) -> torch.Tensor:
    """The rows of all arrays, on the device."""
    if device.type == "cpu" or len(arrays) == 1 or sum(a.nbytes for a in arrays) < LARGE:
        return to_device(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), device, dtype)
    parts = [torch.from_numpy(np.ascontiguousarray(a, dtype=dtype)) for a in arrays]
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    made = torch.empty(shape, dtype=parts[0].dtype, device=device)
    if made.nbytes in STAGED:
        return _staged(parts, made)
    for part, into in zip(parts, made.split([len(p) for p in parts]), strict=True):
        into.copy_(part, non_blocking=True)
    return made


def _staged(parts: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    """Copy contiguous tensors of the host's memory, one behind the other, into one on the device. Returns it."""
    pinned = torch.empty(into.nbytes, dtype=torch.uint8, pin_memory=into.device.type != "cpu")
    pieces, target, memory = _pieces([_bytes(part).numpy() for part in parts]), _bytes(into), pinned.numpy()

    def fill(piece: list[tuple[int, np.ndarray]]) -> slice:
        end = 0
        for start, source in piece:
            end = start + len(source)
            memory[start:end] = source
        return slice(piece[0][0], end)

    for place in _copiers().map(fill, pieces) if len(pieces) > 1 else map(fill, pieces):
        target[place].copy_(pinned[place], non_blocking=True)
    return into


def _pieces(arrays: Sequence[np.ndarray]) -> list[list[tuple[int, np.ndarray]]]:
    """Vectors of bytes in pieces of about PIECE bytes: for each, parts of the vectors and where they go."""
    found, at = list[list[tuple[int, np.ndarray]]](), 0
    for array in arrays:
        for begin in range(0, len(array), PIECE):
            part = array[begin : begin + PIECE]
            if not found or at + len(part) - found[-1][0][0] > PIECE:
                found.append([])
            found[-1].append((at, part))
            at += len(part)
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS, "copy")


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
