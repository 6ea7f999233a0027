"""CUDA C++ kernels for Hopper: what all of their sources begin with, and whether a source can run on a device."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from fastkernels.core import cuda_rtc

SHARED_SOURCE = Path(__file__).parent / "csrc" / "hopper.cu"


def no_hopper(source: Path, device: torch.device) -> str | None:
    """Return why this source cannot be compiled for the device and run there, None if it can."""
    if (reason := _missing(source) or cuda_rtc.unavailable()) is not None:
        return reason
    major, minor = _capability(device)
    return (
        None
        if major == 9
        else f"the kernel is for Hopper (compute capability 9.0), this GPU has {major}.{minor}"
    )


def text(*sources: Path) -> str:
    """Return the text that NVRTC compiles: hopper.cu and these sources."""
    return "".join(source.read_text() for source in (SHARED_SOURCE, *sources))


@lru_cache
def _missing(source: Path) -> str | None:
    found = next((f for f in (source, SHARED_SOURCE) if not f.is_file()), None)
    return None if found is None else f"its source is missing: {found}"


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
