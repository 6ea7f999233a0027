"""vLLM's float8 product, through which its layers' kernels go. Never imported."""

from __future__ import annotations

from typing import Any

import torch
from vllm._custom_ops import cutlass_scaled_mm as host_cutlass_scaled_mm

from fastkernels.core.dispatch import register  # type: ignore[attr-defined]  # of fork.py
from fastkernels.export.plain.scaled_mm import empty, fits, product


def run(*call: Any) -> torch.Tensor:
    return (product if fits(*call) else host_cutlass_scaled_mm)(*call)


scaled_mm = register(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out_dtype, Tensor? bias=None) -> Tensor",
    run, empty,
)  # fmt: skip


def cutlass_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """a [M, K] times b [K, N] with contiguous columns, in float8 e4m3."""
    return scaled_mm(a, b, scale_a, scale_b, out_dtype, bias)
