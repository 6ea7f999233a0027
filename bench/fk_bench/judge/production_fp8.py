"""The hosts' kernels that quantize to float8 e4m3, under our ops' calling conventions."""

from __future__ import annotations

from typing import Any

import torch

from .baselines import Baseline, Function, dense, filled, first, half

T = torch.Tensor
FP8_MAX = 448.0
MIN_ABSMAX = 1 / 512  # vLLM's kernels have it built in
GIVEN = "the scale was given, and the host has no use for a copy of it"


def _outputs(x: T, group_size: int, column_major: bool = False, tma_aligned: bool = False) -> tuple[T, T]:
    from fastkernels.overrides.l1._fp8 import empty_outputs

    return empty_outputs(x.shape, x.device, group_size == 0, group_size, column_major, tma_aligned)


def _flat(x: T) -> T:
    return x.view(-1, x.shape[-1])


def _vllm_static() -> Function:
    from .production_vllm import kernels

    c = kernels()

    def quantize_fp8(x: T, scale: T, *_: Any) -> tuple[T, T]:
        q, s = _outputs(x, 0)
        c.static_scaled_fp8_quant(_flat(q), _flat(x), scale, None)
        return q, s

    return quantize_fp8


def _vllm_dynamic() -> Function:
    from .production_vllm import kernels

    c = kernels()

    def quantize_fp8(
        x: T, scale: None = None, group_size: int = 0, scale_ub: T | None = None, min_absmax: float = MIN_ABSMAX,
        column_major: bool = False, tma_aligned: bool = False, ue8m0: bool = False,
    ) -> tuple[T, T]:  # fmt: skip
        q, s = _outputs(x, group_size, column_major, tma_aligned)
        if group_size == 0:
            c.dynamic_scaled_fp8_quant(_flat(q), _flat(x), s)
        elif group_size < 0:
            c.dynamic_per_token_scaled_fp8_quant(_flat(q), _flat(x), s.view(-1, 1), scale_ub)
        else:
            layout = (ue8m0, column_major, tma_aligned)
            c.per_token_group_fp8_quant(x, q, s, group_size, min_absmax, -FP8_MAX, FP8_MAX, *layout)
        return q, s

    return quantize_fp8


def _no_static(x: T, scale: T | None = None, *_: Any) -> str | None:
    return first("no scale is given" if scale is None else None, dense(x), filled(x))


def _no_dynamic(
    x: T, scale: T | None = None, group_size: int = 0, scale_ub: T | None = None, min_absmax: float = MIN_ABSMAX,
    column_major: bool = False, tma_aligned: bool = False, ue8m0: bool = False,
) -> str | None:  # fmt: skip
    if scale is not None:
        return "a scale is given"
    if group_size <= 0 and (min_absmax != MIN_ABSMAX or ue8m0):
        return "vLLM's least scale of a tensor or token is its own, and no power of two"
    if group_size >= 0 and scale_ub is not None:
        return "vLLM bounds the scales of tokens only"
    if column_major and (group_size <= 0 or x.dim() != 2):
        return "vLLM's column-major scales are those of groups in two dimensions"
    return first(dense(x), filled(x), _no_group(x, group_size))


def _no_group(x: T, group_size: int) -> str | None:
    """Its sixteen threads a group read vectors of 16 bytes."""
    vector = 16 // x.element_size()
    return (
        f"needs groups of a multiple of {vector} values" if group_size > 0 and group_size % vector else None
    )


def _sgl() -> Function:
    from sgl_kernel.gemm import sgl_per_token_group_quant_8bit, sgl_per_token_quant_fp8

    def quantize_fp8(
        x: T, scale: None = None, group_size: int = 0, scale_ub: None = None, min_absmax: float = MIN_ABSMAX,
        column_major: bool = False, tma_aligned: bool = False, *_: Any,
    ) -> tuple[T, T]:  # fmt: skip
        q, s = _outputs(x, group_size, column_major, tma_aligned)
        if group_size < 0:
            sgl_per_token_quant_fp8(_flat(x), _flat(q), s.view(-1, 1))
        else:
            sgl_per_token_group_quant_8bit(x, q, s, group_size, min_absmax, -FP8_MAX, FP8_MAX, False)
        return q, s

    return quantize_fp8


def _no_sgl(
    x: T, scale: T | None = None, group_size: int = 0, scale_ub: T | None = None, min_absmax: float = MIN_ABSMAX,
    column_major: bool = False, tma_aligned: bool = False, ue8m0: bool = False,
) -> str | None:  # fmt: skip
    if scale is not None or scale_ub is not None or ue8m0:
        return "sgl_kernel is used without given scales, bounds and powers of two"
    if group_size == 0 or (group_size > 0 and group_size not in (16, 32, 64, 128)):
        return f"sgl_kernel has groups of 16 to 128 and tokens, got {group_size}"
    if x.dim() != 2 or (group_size < 0 and x.shape[-1] % 16):
        return f"sgl_kernel takes [T, N] with N a multiple of 16, got {tuple(x.shape)}"
    return first(half(x), dense(x), filled(x))


ADAPTERS: dict[str, tuple[Baseline, ...]] = {
    "quantize_fp8": (
        Baseline("vllm", "host", _vllm_dynamic, ("vllm",), refuses=_no_dynamic),
        Baseline("vllm-static", "host", _vllm_static, ("vllm",), refuses=_no_static, differs=GIVEN),
        Baseline("sgl_kernel", "host", _sgl, ("sgl_kernel",), refuses=_no_sgl),
    ),
}
