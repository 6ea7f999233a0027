"""CUDA C++ kernels for Hopper: the text that NVRTC compiles, and whether it can run on a device."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

SHARED_SOURCE = str(Path(__file__).with_name("hopper.cu"))  # an exported file has its text


@lru_cache
def no_hopper(source: str, device: torch.device) -> str | None:
    """Return why the source cannot be compiled for the device and run there, None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "the kernel is for Hopper"
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception:
        return "NVRTC is not available"
    return None


def text(*sources: str) -> str:
    """Return the text that NVRTC compiles."""
    return "".join((SHARED_SOURCE, *sources))
