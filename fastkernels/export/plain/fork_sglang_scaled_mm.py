"""The host's own float8 product, which computes what our kernel does not support. Never imported."""

from __future__ import annotations

import torch
from sglang.kernels.ops.gemm import fp8_scaled_mm as host_fp8_scaled_mm


def linear_fp8_sgl(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    return host_fp8_scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype or torch.bfloat16, bias)
