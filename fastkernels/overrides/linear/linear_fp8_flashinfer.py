"""FlashInfer's FP8 product with block scales (0.6), which vLLM runs for fewer than 32 tokens on Hopper.

FlashInfer compiles it with nvcc at its first use, and again at the first call of each shape. A CUDA graph can therefore
contain only shapes that were called before its capture.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from fastkernels.overrides.linear.linear_fp8_libraries import supports_deepgemm

T = torch.Tensor
FEW = 32  # from this number of tokens on, vLLM runs DeepGEMM
_called: set[tuple[Any, ...]] = set()


def refused(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """Return why vLLM would not run FlashInfer for this call, None if it would."""
    if bias is not None or x.dim() != 2 or x.shape[0] >= FEW:
        return f"FlashInfer is used for fewer than {FEW} tokens without a bias"
    if (reason := supports_deepgemm(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    aligned = x_scale.stride(0) == 1 and x_scale.stride(1) == -(-x.shape[0] // 4) * 4
    return None if aligned else "FlashInfer needs column-major scales, columns padded to four tokens"


def supports_flashinfer(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """Return why FlashInfer does not support this call now, None if it does."""
    if (reason := refused(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    if torch.cuda.is_current_stream_capturing() and _shape(x, weight) not in _called:
        return "FlashInfer's kernel for this shape was not compiled before a CUDA graph was captured"
    found = product()
    return found if isinstance(found, str) else None


def linear_fp8_flashinfer(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> T:
    """Run FlashInfer on arguments that `refused` accepts. Raises RuntimeError where it cannot be compiled."""
    found = product()
    if isinstance(found, str):
        raise RuntimeError(found)
    y = found(x, weight, x_scale, weight_scale)
    _called.add(_shape(x, weight))
    return y


def _shape(x: T, weight: T) -> tuple[Any, ...]:
    return x.device, *x.shape, weight.shape[0]


@lru_cache
def product() -> Callable[..., T] | str:
    """Return FlashInfer's compiled function, or the reason why it cannot be used."""
    try:
        gemm = importlib.import_module("flashinfer.gemm.gemm_base")
        gemm.get_fp8_blockscale_gemm_runner_sm90()
        return gemm.fp8_blockscale_gemm_sm90
    except Exception as error:  # from the import, nvcc, or loading
        first = (str(error).splitlines() or [""])[0]
        return f"FlashInfer's FP8 product cannot be used ({type(error).__name__}: {first})"
