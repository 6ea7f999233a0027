"""Baselines of linear layers: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, Function, dense, filled, first
from fastkernels.overrides.kit.libraries import T, from_blas
from fastkernels.overrides.linear.linear_fp8_flashinfer import linear_fp8_flashinfer, supports_flashinfer
from fastkernels.overrides.linear.linear_fp8_libraries import (
    DEEP_GEMM,
    linear_fp8_cublas,
    linear_fp8_cutlass,
    linear_fp8_deepgemm,
    linear_fp8_sgl,
    supports_cublas,
    supports_cutlass,
    supports_deepgemm,
    supports_sgl,
)
from fastkernels.overrides.linear.linear_fp8_scales import BLOCK, granularity


def _vllm_triton_linear() -> Function:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    def linear_fp8(
        x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None,
    ) -> T:  # fmt: skip
        y = w8a8_triton_block_scaled_mm(
            x, weight, x_scale, weight_scale, [BLOCK, BLOCK], out_dtype or torch.bfloat16
        )
        return y if bias is None else y + bias

    return linear_fp8


def _no_blocks(x: T, weight: T, x_scale: T, weight_scale: T, *rest: Any) -> str | None:
    blocks = granularity(x, weight, x_scale, weight_scale) == BLOCK
    return first(None if blocks else "needs block scales", dense(x, weight), filled(x, weight))


def _linear(x: T, weight: T, bias: T | None = None) -> T:
    return F.linear(x, weight, bias)


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "linear": (*from_blas(_linear),),
    "linear_fp8": (
        Baseline("cutlass", "host", lambda: linear_fp8_cutlass, ("vllm",), refuses=supports_cutlass),
        Baseline("deepgemm", "host", lambda: linear_fp8_deepgemm, (DEEP_GEMM,), refuses=supports_deepgemm),
        Baseline("cublas", "host", lambda: linear_fp8_cublas, refuses=supports_cublas),
        Baseline(
            "flashinfer", "host", lambda: linear_fp8_flashinfer, ("flashinfer",), refuses=supports_flashinfer
        ),
        Baseline("sgl_kernel", "host", lambda: linear_fp8_sgl, ("sgl_kernel",), refuses=supports_sgl),
        Baseline("vllm-triton", "host", _vllm_triton_linear, ("vllm",), refuses=_no_blocks),
    ),
}
