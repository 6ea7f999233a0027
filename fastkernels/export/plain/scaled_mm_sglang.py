"""SGLang's float8 product, through which its layers' methods go. Never imported."""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.gemm import fp8_scaled_mm as host_fp8_scaled_mm

from fastkernels.core.dispatch import register  # type: ignore[attr-defined]  # of fork.py
from fastkernels.export.plain.scaled_mm import empty, fits, product


def run(*call: Any) -> torch.Tensor:
    return (product if fits(*call) else host_fp8_scaled_mm)(*call)


scaled_mm = register(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out_dtype, Tensor? bias=None) -> Tensor",
    run, empty,
)  # fmt: skip


def fp8_scaled_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor,
    out_dtype: torch.dtype, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """mat_a [M, K] times mat_b [K, N] with contiguous columns, in float8 e4m3."""
    return scaled_mm(mat_a, mat_b, scales_a, scales_b, out_dtype, bias)
