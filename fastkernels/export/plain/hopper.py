"""CUDA C++ kernels for Hopper: the text that NVRTC compiles, and whether it can run on a device."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from fastkernels.core.cuda_rtc import nvrtc  # type: ignore[attr-defined]  # of plain/cuda_rtc.py

SHARED_SOURCE = str(Path(__file__).with_name("hopper.cu"))  # an exported file has its text


@lru_cache
def no_hopper(source: str, device: torch.device) -> str | None:
    """Return why the source cannot be compiled for the device and run there, None if it can."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return None if hopper and nvrtc is not None else "no Hopper, or no NVRTC"


def text(*sources: str) -> str:
    """Return the text that NVRTC compiles."""
    return "".join((SHARED_SOURCE, *sources))
