"""FP8 products of libraries, providers of linear_fp8: CUTLASS of vLLM and sgl_kernel, DeepGEMM, cuBLAS, FlashInfer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from fastkernels.core.dispatch import installed
from fastkernels.overrides.linear.kernels.linear_fp8_scales import (
    BLOCK,
    ROW,
    TENSOR,
    check,
    column,
    granularity,
    matrix,
    shaped,
)
from fastkernels.overrides.linear.kernels.linear_fp8_triton import unsupported

T = torch.Tensor
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")


def _unusual(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None, out_dtype: torch.dtype | None
) -> str | None:
    """Return why no library supports this call, None if some may."""
    if (reason := unsupported(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    n, k = weight.shape
    if n == 0 or x.numel() == 0:
        return "the call is empty"
    if n % 16 or k % 16:
        return f"N = {n} and K = {k} must be multiples of 16"
    if not x.is_contiguous() or weight.stride(0) % 16:
        return f"x has strides {tuple(x.stride())}, weight {tuple(weight.stride())}: rows must be aligned and dense"
    if bias is not None and bias.dtype != (out_dtype or torch.bfloat16):
        return f"bias is {bias.dtype}, the result {out_dtype or torch.bfloat16}"
    return None


def supports_cutlass(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """Return why vLLM's CUTLASS kernels do not support this call, None if they do."""
    if (reason := _unusual(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    if granularity(x, weight, x_scale, weight_scale) != BLOCK:
        return None
    if bias is not None:
        return "its kernel for block scales adds no bias"
    if x.shape[-1] % BLOCK or weight.shape[0] % BLOCK:
        return f"N = {weight.shape[0]} and K = {x.shape[-1]} must be multiples of {BLOCK} for block scales"
    return None


def linear_fp8_cutlass(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> T:
    kind = check(x, weight, x_scale, weight_scale, bias)
    rows = matrix(x)
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=out_dtype or torch.bfloat16, device=x.device)
    if kind == BLOCK:
        x_scale, weight_scale = column_major(x_scale.reshape(rows.shape[0], -1)), weight_scale.t()
    else:
        x_scale, weight_scale = column(x_scale), column(weight_scale)
    _cutlass_scaled_mm()(out, rows, weight.t(), x_scale, weight_scale, bias)
    return shaped(out, x)


@lru_cache
def _cutlass_scaled_mm() -> Any:
    importlib.import_module("vllm._custom_ops")  # loads the extension
    return torch.ops._C.cutlass_scaled_mm.default


def column_major(scales: T) -> T:
    """Return scales [M, K / 128] in dense column-major layout, as quantize_fp8 gives with column_major_scales."""
    return scales if scales.t().is_contiguous() else scales.t().contiguous().t()


def supports_sgl(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """Return why sgl_kernel's CUTLASS kernel does not support this call, None if it does."""
    if (reason := _unusual(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    if x_scale.numel() != x.numel() // x.shape[-1] or weight_scale.numel() != weight.shape[0]:
        return "sgl_kernel needs one scale for each token and one for each row of the weight"
    return None


def linear_fp8_sgl(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> T:
    check(x, weight, x_scale, weight_scale, bias)
    scales = column(x_scale).contiguous(), column(weight_scale).contiguous()
    found = _sgl_kernel()(matrix(x), weight.t(), *scales, out_dtype or torch.bfloat16, bias)
    return shaped(found, x)


@lru_cache
def _sgl_kernel() -> Any:
    importlib.import_module("sgl_kernel")  # loads the extension
    return torch.ops.sgl_kernel.fp8_scaled_mm.default


def supports_cublas(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """Return why torch._scaled_mm does not support this call, None if it does."""
    if (reason := _unusual(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    kind = granularity(x, weight, x_scale, weight_scale)
    if kind == BLOCK:
        return "block scales are left to DeepGEMM and CUTLASS"
    rows = x_scale.numel() == x.numel() // x.shape[-1] and weight_scale.numel() == weight.shape[0]
    if kind == ROW and (out_dtype == torch.float16 or not rows):
        return "with scales per row, both x and the weight must have them, and the result must be bfloat16"
    return None


def linear_fp8_cublas(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> T:
    kind = check(x, weight, x_scale, weight_scale, bias)
    if kind == TENSOR:
        x_scale, weight_scale = x_scale.reshape(()), weight_scale.reshape(())
    else:
        x_scale, weight_scale = column(x_scale).contiguous(), weight_scale.reshape(1, -1).contiguous()
    found = torch._scaled_mm(
        matrix(x), weight.t(), scale_a=x_scale, scale_b=weight_scale, bias=bias,
        out_dtype=out_dtype or torch.bfloat16,
    )  # fmt: skip
    return shaped(found, x)


def supports_deepgemm(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> str | None:
    """Return why DeepGEMM does not support this call as the hosts make it, None if it does."""
    if (reason := _unusual(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    if granularity(x, weight, x_scale, weight_scale) != BLOCK:
        return "DeepGEMM needs block scales"
    if out_dtype == torch.float16 or weight.shape[0] % 64 or weight.shape[1] % BLOCK:
        return (
            f"DeepGEMM gives bfloat16 for multiples of 64 rows and {BLOCK} columns, got {tuple(weight.shape)}"
        )
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        return "DeepGEMM is used on Hopper only, with float32 scales"
    return None


def left_to_deepgemm(x: T, weight: T, x_scale: T, weight_scale: T, *rest: Any) -> str | None:
    """Return why our kernel leaves this call to DeepGEMM (installed, and measured faster), None if ours runs."""
    tokens = x.numel() // weight.shape[1]
    if tokens <= 32 or supports_deepgemm(x, weight, x_scale, weight_scale, *rest) or not _has_deep_gemm():
        return None
    return f"{tokens} tokens with block scales are over 32: DeepGEMM is faster"


@lru_cache
def _has_deep_gemm() -> bool:
    return any(map(installed, DEEP_GEMM))


def linear_fp8_deepgemm(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> T:
    check(x, weight, x_scale, weight_scale, bias)
    rows = matrix(x)
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    scales = x_scale.reshape(rows.shape[0], -1)
    # Hopper's kernel reads float32 scales of any value; DeepGEMM copies scales that are in another layout.
    _deep_gemm().fp8_gemm_nt((rows, scales), (weight, weight_scale), out, disable_ue8m0_cast=True)
    if bias is not None:
        out += bias
    return shaped(out, x)


@lru_cache
def _deep_gemm() -> Any:
    """Return the package that vLLM would use: an installed one, else the copy in vLLM's wheel."""
    try:
        found = importlib.import_module(DEEP_GEMM[0])
    except ImportError:
        found = importlib.import_module(DEEP_GEMM[1])
    if hasattr(found, "set_pdl"):
        found.set_pdl(True)  # as vLLM does
    return found


# FlashInfer's FP8 product with block scales (0.6), which vLLM runs for fewer than 32 tokens on Hopper. FlashInfer
# compiles it with nvcc at its first use, and again at the first call of each shape: a CUDA graph has only shapes that
# were called before its capture.
FEW = 32  # from this number of tokens on, vLLM runs DeepGEMM
_called: set[tuple[Any, ...]] = set()


def _not_for_flashinfer(
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
    if (reason := _not_for_flashinfer(x, weight, x_scale, weight_scale, bias, out_dtype)) is not None:
        return reason
    if torch.cuda.is_current_stream_capturing() and _shape(x, weight) not in _called:
        return "FlashInfer's kernel for this shape was not compiled before a CUDA graph was captured"
    found = flashinfer_product()
    return found if isinstance(found, str) else None


def linear_fp8_flashinfer(
    x: T, weight: T, x_scale: T, weight_scale: T, bias: T | None = None, out_dtype: torch.dtype | None = None
) -> T:
    """Run FlashInfer on a call that `supports_flashinfer` accepts. Raises RuntimeError where it cannot be compiled."""
    found = flashinfer_product()
    if isinstance(found, str):
        raise RuntimeError(found)
    y = found(x, weight, x_scale, weight_scale)
    _called.add(_shape(x, weight))
    return y


def _shape(x: T, weight: T) -> tuple[Any, ...]:
    return x.device, *x.shape, weight.shape[0]


@lru_cache
def flashinfer_product() -> Callable[..., T] | str:
    """Return FlashInfer's compiled function, or the reason why it cannot be used."""
    try:
        gemm = importlib.import_module("flashinfer.gemm.gemm_base")
        gemm.get_fp8_blockscale_gemm_runner_sm90()
        return gemm.fp8_blockscale_gemm_sm90
    except Exception as error:  # from the import, nvcc, or loading
        first = (str(error).splitlines() or [""])[0]
        return f"FlashInfer's FP8 product cannot be used ({type(error).__name__}: {first})"
