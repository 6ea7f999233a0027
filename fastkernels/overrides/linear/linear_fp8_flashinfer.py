"""FlashInfer's FP8 product with scales of blocks (0.6), which vLLM runs for fewer than 32 tokens on Hopper.

It is compiled with nvcc when it is first asked for, and for each shape at its first call, so a CUDA graph can only have
shapes that were called before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from fastkernels.overrides.linear.linear_fp8_libraries import supports_deepgemm

T = torch.Tensor
FEW = 32  # tokens, from which on vLLM runs DeepGEMM
_called: set[tuple[Any, ...]] = set()


def refused(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """Why this is no call for it as vLLM makes it; None if it is."""
    if bias is not None or x.dim() != 2 or x.shape[0] >= FEW:
        return f"FlashInfer is used for fewer than {FEW} tokens without a bias"
    if (reason := supports_deepgemm(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    aligned = x_scale.stride(0) == 1 and x_scale.stride(1) == -(-x.shape[0] // 4) * 4
    return None if aligned else "its scales lie token by token, columns padded to four"


def supports_flashinfer(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """None if FlashInfer takes this call here and now, else the reason why not."""
    if (reason := refused(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    if torch.cuda.is_current_stream_capturing() and _shape(x, weight) not in _called:
        return "FlashInfer's kernel for this shape was not compiled before a CUDA graph was captured"
    found = product()
    return found if isinstance(found, str) else None


def linear_fp8_flashinfer(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> T:
    """The op's arguments, of which `refused` has nothing to say. Raises RuntimeError where it cannot be compiled."""
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
    """FlashInfer's function, compiled, or why there is none."""
    try:
        gemm = importlib.import_module("flashinfer.gemm.gemm_base")
        gemm.get_fp8_blockscale_gemm_runner_sm90()
        return gemm.fp8_blockscale_gemm_sm90
    except Exception as error:  # of the import, of nvcc, of loading
        first = (str(error).splitlines() or [""])[0]
        return f"FlashInfer's product cannot be used ({type(error).__name__}: {first})"
