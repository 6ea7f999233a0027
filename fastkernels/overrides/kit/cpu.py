"""Features of this machine's CPU. Imports no torch until a function needs it."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")  # Linux's names of instructions that multiply bfloat16


@cache
def _fields() -> dict[str, str]:
    """The fields that Linux gives of a CPU, such as 'model name'."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def flags() -> frozenset[str]:
    """Linux's names of the CPU's instruction sets, such as 'avx512bw'; empty if the system does not list them."""
    return frozenset((_fields().get("flags") or _fields().get("Features") or "").split())


def model() -> str:
    """The CPU's name."""
    return _fields().get("model name") or platform.processor() or platform.machine()


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16 products; True if the system does not list instructions."""
    return not flags() or not flags().isdisjoint(BFLOAT16_UNITS)


def onednn_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices here; PyTorch's own code, without it, is slower than float32."""
    import torch

    supported = getattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None
    )  # absent in builds without oneDNN
    return supported is not None and bool(supported())


@cache
def packing_unsupported(dtype: torch.dtype) -> str | None:
    """Why PyTorch cannot multiply by a weight of this type in oneDNN's layout; None if it can.

    PyTorch requires instructions of the CPU, by rules that change with its version: a small product decides.
    """
    import torch

    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 1)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 16, dtype=dtype), weight, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return str(error).strip().partition("\n")[0]
    return None
