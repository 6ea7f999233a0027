"""The host's own float8 product, which computes what our kernel does not support. Never imported."""

from __future__ import annotations

import torch
from vllm._custom_ops import cutlass_scaled_mm as host_cutlass_scaled_mm


def linear_fp8_cutlass(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    # [K / 128, N / 128] or [N, 1]
    scale = weight_scale.t() if weight_scale.dim() == 2 else weight_scale.view(-1, 1)
    return host_cutlass_scaled_mm(x, weight.t(), x_scale, scale, out_dtype or torch.bfloat16, bias)
