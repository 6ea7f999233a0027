"""Baselines of linear layers: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, Function, Preparation, dense, filled, first, half, inductor
from fastkernels.overrides.kit.libraries import T, from_blas, from_torch
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, granularity
from fastkernels.overrides.linear.linear_fp8_libraries import (
    DEEP_GEMM,
    linear_fp8_cublas,
    linear_fp8_cutlass,
    linear_fp8_deepgemm,
    linear_fp8_flashinfer,
    linear_fp8_sgl,
    supports_cublas,
    supports_cutlass,
    supports_deepgemm,
    supports_flashinfer,
    supports_sgl,
)
from fastkernels.overrides.linear.linear_int4 import linear_int4_cublas, unpack_int4, untile_int4
from fastkernels.overrides.linear.linear_int4 import supports_cublas as supports_int4_cublas
from fastkernels.overrides.linear.linear_nvfp4 import linear_nvfp4_cublas
from fastkernels.overrides.linear.linear_nvfp4 import supports_cublas as supports_nvfp4_cublas
from fastkernels.overrides.linear.linear_ternary import quantize_int8, unpack_ternary


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


def _marlin() -> Function:
    from vllm.model_executor.layers.quantization.utils import marlin_utils as marlin

    def linear_int4(x: T, *_: T | None, prepared: Sequence[Any]) -> T:
        weights, bias = prepared
        return marlin.apply_gptq_marlin_linear(x, **weights, bias=bias)

    return linear_int4


def _marlin_weights(
    x: T, weight: T, scale: T, zero: T | None = None, bias: T | None = None
) -> dict[str, Any]:
    """Repack a weight as vLLM does at load: the arguments of vLLM's linear layer but x and the bias."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils as marlin
    from vllm.scalar_type import scalar_types

    def takes(function: Function, **given: Any) -> dict[str, Any]:
        """The arguments that this version of vLLM has."""
        return {name: v for name, v in given.items() if name in inspect.signature(function).parameters}

    n, k, none = weight.shape[0], 2 * weight.shape[1], torch.empty(0, dtype=torch.int, device=weight.device)
    weight, scale, zero = untile_int4(weight, scale, zero)
    columns = unpack_int4(weight).t().int().unflatten(0, (-1, 8))
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=weight.device)
    words = (columns << shifts[:, None]).sum(1, dtype=torch.int32).contiguous()
    repack = _custom_ops.gptq_marlin_repack
    packed = repack(words, **takes(repack, perm=none, size_k=k, size_n=n, num_bits=4))
    group = k // scale.shape[1] if scale.shape[1] > 1 else -1
    scales = marlin.marlin_permute_scales(scale.t().contiguous().to(x.dtype), k, n, group)
    zeros = none if zero is None else marlin.marlin_zero_points(zero.t().int(), scale.shape[1], n, 4)
    return takes(
        marlin.apply_gptq_marlin_linear, weight=packed, weight_scale=scales, weight_zp=zeros, g_idx=none,
        g_idx_sort_indices=none, workspace=marlin.marlin_make_workspace_new(weight.device), is_k_full=True,
        wtype=scalar_types.uint4b8 if zero is None else scalar_types.uint4, output_size_per_partition=n,
        input_size_per_partition=k,
    )  # fmt: skip


def _marlin_bias(x: T, weight: T, scale: T, zero: T | None = None, bias: T | None = None) -> T | None:
    from vllm.model_executor.layers.quantization.utils import marlin_utils as marlin

    return None if bias is None else marlin.marlin_permute_bias(bias)


def _no_marlin(
    x: T, weight: T, weight_scale: T, weight_zero: T | None = None, bias: T | None = None
) -> str | None:
    n, k, groups = weight.shape[0], 2 * weight.shape[1], weight_scale.shape[1]
    group = k // groups if groups else 0
    if n % 64 or k % 128:
        return f"N = {n} and K = {k} must be multiples of 64 and 128"
    if groups > 1 and group not in (32, 64, 128):
        return f"groups of {group} columns are not 32, 64 or 128"
    if groups == 1 and weight_zero is not None:
        return "zero points need groups"
    return first(half(x), dense(x, weight, weight_scale), filled(x))


def _unpacked(x: T, weight: T, weight_scale: T, bias: T | None = None) -> T:
    """Unpack the weight and multiply in x's dtype, as transformers' BitLinear does."""
    q, scale = quantize_int8(x)
    y = F.linear(q, unpack_ternary(weight).to(x.dtype) - 1) * (scale * weight_scale)
    return (y if bias is None else y + bias).to(x.dtype)


def _linear_gelu(x: T, weight: T, bias: T | None = None, approximate: str = "none") -> T:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def _linear_silu_and_mul(x: T, weight: T, bias: T | None = None) -> T:
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(gate) * up


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "batched_matmul": (*from_blas(torch.bmm),),
    "linear": (*from_blas(_linear),),
    "linear_gelu": (*from_torch(_linear_gelu), inductor("linear_gelu")),
    "linear_silu_and_mul": (*from_blas(_linear_silu_and_mul), inductor("linear_silu_and_mul")),
    "linear_int4": (
        Baseline(
            "marlin",
            "host",
            _marlin,
            ("vllm",),
            refuses=_no_marlin,
            prepares=(Preparation((1, 2, 3), _marlin_weights), Preparation((4,), _marlin_bias)),
        ),
        Baseline("cublas", "library", lambda: linear_int4_cublas, refuses=supports_int4_cublas),
    ),
    "linear_nvfp4": (
        Baseline("cublas", "library", lambda: linear_nvfp4_cublas, refuses=supports_nvfp4_cublas),
    ),
    "linear_ternary": (Baseline("unpacked", "library", lambda: _unpacked),),
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
