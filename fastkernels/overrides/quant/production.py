"""Baselines of this family: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.baseline import Baseline, Function, dense, filled, first, half, inductor, same
from fastkernels.overrides.kit.libraries import T, vllm_ops

FP8_MAX = 448.0

MIN_ABSMAX = 1 / 512  # built into vLLM's kernels

GIVEN = "the scale is given, and the host returns no copy of it"


def _outputs(x: T, group_size: int, column_major: bool = False, tma_aligned: bool = False) -> tuple[T, T]:
    from fastkernels.overrides.kit.fp8 import empty_outputs

    return empty_outputs(x.shape, x.device, group_size == 0, group_size, column_major, tma_aligned)


def _flat(x: T) -> T:
    return x.view(-1, x.shape[-1])


def _vllm_static() -> Function:
    c = vllm_ops()

    def quantize_fp8(x: T, scale: T, *_: Any) -> tuple[T, T]:
        q, s = _outputs(x, 0)
        c.static_scaled_fp8_quant(_flat(q), _flat(x), scale, None)
        return q, s

    return quantize_fp8


def _vllm_dynamic() -> Function:
    c = vllm_ops()

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
        return "vLLM has a fixed minimum scale for tensors and tokens, and no powers of two"
    if group_size >= 0 and scale_ub is not None:
        return "vLLM bounds scales per token only"
    if column_major and (group_size <= 0 or x.dim() != 2):
        return "vLLM has column-major scales only for groups in two dimensions"
    return first(dense(x), filled(x), _no_group(x, group_size))


def _no_group(x: T, group_size: int) -> str | None:
    """sgl_kernel reads vectors of 16 bytes with sixteen threads per group."""
    vector = 16 // x.element_size()
    return (
        f"needs groups of a multiple of {vector} values" if group_size > 0 and group_size % vector else None
    )


def _fp8_sgl() -> Function:
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
        return "sgl_kernel supports no given scales, bounds or powers of two"
    if group_size == 0 or (group_size > 0 and group_size not in (16, 32, 64, 128)):
        return f"sgl_kernel supports tokens and groups of 16 to 128, got {group_size}"
    if x.dim() != 2 or (group_size < 0 and x.shape[-1] % 16):
        return f"sgl_kernel takes [T, N] with N a multiple of 16, got {tuple(x.shape)}"
    return first(half(x), dense(x), filled(x))


def _vllm_silu(static: bool) -> Any:
    def make() -> Function:
        c = vllm_ops()

        def silu_mul_quant_fp8(
            x: T, scale: T | None = None, group_size: int = -1, scale_ub: T | None = None,
            min_absmax: float = MIN_ABSMAX, column_major: bool = False, *_: Any,
        ) -> tuple[T, T]:  # fmt: skip
            half_x = x[..., : x.shape[-1] // 2]
            q, s = _outputs(half_x, 0 if static else group_size, column_major)
            if static:
                c.silu_and_mul_quant(_flat(q), _flat(x), scale)
            elif group_size > 0:
                c.silu_and_mul_per_block_quant(_flat(q), _flat(x), s, group_size, scale_ub, column_major)
            else:  # vLLM has no kernel for both
                y = torch.empty(half_x.shape, dtype=x.dtype, device=x.device)
                c.silu_and_mul(y, x)
                c.dynamic_per_token_scaled_fp8_quant(_flat(q), _flat(y), s.view(-1, 1), scale_ub)
            return q, s

        return silu_mul_quant_fp8

    return make


def _no_silu_static(x: T, scale: T | None = None, *_: Any) -> str | None:
    return _no_static(x, scale)


def _no_silu(
    x: T, scale: T | None = None, group_size: int = -1, scale_ub: T | None = None, min_absmax: float = MIN_ABSMAX,
    column_major: bool = False, ue8m0: bool = False,
) -> str | None:  # fmt: skip
    if scale is not None:
        return "a scale is given"
    return _no_fused(x, group_size, min_absmax, column_major, ue8m0)


def _no_fused(x: T, group_size: int, min_absmax: float, column_major: bool, ue8m0: bool) -> str | None:
    if min_absmax != MIN_ABSMAX or ue8m0:
        return "vLLM has a fixed minimum scale, and no powers of two"
    if group_size > 0 and (group_size not in (64, 128) or x.dim() != 2):
        return f"vLLM supports groups of 64 and 128 in two dimensions, got {group_size} of {tuple(x.shape)}"
    if column_major and group_size < 0:
        return "vLLM has column-major scales only for groups"
    return first(half(x) if group_size > 0 else None, dense(x), filled(x))


def _sgl_silu() -> Function:
    from sgl_kernel.gemm import sgl_per_token_group_quant_8bit

    def silu_mul_quant_fp8(
        x: T, scale: None = None, group_size: int = -1, scale_ub: None = None, min_absmax: float = MIN_ABSMAX,
        column_major: bool = False, *_: Any,
    ) -> tuple[T, T]:  # fmt: skip
        q, s = _outputs(x[..., : x.shape[-1] // 2], group_size, column_major)
        sgl_per_token_group_quant_8bit(
            x, q, s, group_size, min_absmax, -FP8_MAX, FP8_MAX, False, fuse_silu_and_mul=True
        )
        return q, s

    return silu_mul_quant_fp8


def _no_sgl_silu(
    x: T, scale: T | None = None, group_size: int = -1, scale_ub: T | None = None, min_absmax: float = MIN_ABSMAX,
    column_major: bool = False, ue8m0: bool = False,
) -> str | None:  # fmt: skip
    if group_size < 0:
        return "sgl_kernel has no SiluAndMul with scales per token"
    return _no_sgl(x, scale, group_size, scale_ub, min_absmax, column_major, False, ue8m0)


def _vllm_norm(static: bool) -> Any:
    def make() -> Function:
        c = vllm_ops()

        def rms_norm_quant_fp8(
            x: T, weight: T, eps: float, scale: T | None = None, group_size: int = -1, residual: T | None = None,
            scale_ub: T | None = None, min_absmax: float = MIN_ABSMAX, column_major: bool = False,
            tma_aligned: bool = False,
        ) -> tuple[T, T]:  # fmt: skip
            q, s = _outputs(x, 0 if static else group_size, column_major, tma_aligned)
            if static and residual is not None:
                c.fused_add_rms_norm_static_fp8_quant(q, x, residual, weight, scale, eps)
            elif static:
                c.rms_norm_static_fp8_quant(q, x, weight, scale, eps)
            elif group_size < 0:
                c.rms_norm_dynamic_per_token_quant(q, x, weight, s.view(-1, 1), eps, scale_ub, residual)
            else:
                c.rms_norm_per_block_quant(q, x, weight, s, eps, scale_ub, residual, group_size, column_major)
            return q, s

        return rms_norm_quant_fp8

    return make


def _no_norm_static(
    x: T,
    weight: T,
    eps: float,
    scale: T | None = None,
    group_size: int = -1,
    residual: T | None = None,
    *_: Any,
) -> str | None:
    return first("no scale is given" if scale is None else None, _no_norm_rows(x, weight, residual))


def _no_norm_rows(x: T, weight: T, residual: T | None) -> str | None:
    return first(same(x, weight, residual), dense(x, weight, residual), filled(x))


def _no_norm(
    x: T, weight: T, eps: float, scale: T | None = None, group_size: int = -1, residual: T | None = None,
    scale_ub: T | None = None, min_absmax: float = MIN_ABSMAX, column_major: bool = False, tma_aligned: bool = False,
) -> str | None:  # fmt: skip
    if scale is not None:
        return "a scale is given"
    return first(
        _no_fused(x, group_size, min_absmax, column_major, False), _no_norm_rows(x, weight, residual)
    )


def _flashinfer_norm() -> Function:
    from flashinfer.norm import fused_add_rmsnorm_quant, rmsnorm_quant

    def rms_norm_quant_fp8(
        x: T, weight: T, eps: float, scale: T, group_size: int = -1, residual: T | None = None, *_: Any
    ) -> tuple[T, T]:
        q, s = _outputs(x, 0)
        if residual is None:
            rmsnorm_quant(q, x, weight, scale, eps)
        else:
            fused_add_rmsnorm_quant(q, x, residual, weight, scale, eps)
        return q, s

    return rms_norm_quant_fp8


def _no_flashinfer_norm(
    x: T,
    weight: T,
    eps: float,
    scale: T | None = None,
    group_size: int = -1,
    residual: T | None = None,
    *_: Any,
) -> str | None:
    two = None if x.dim() == 2 else "takes two dimensions"
    return first(_no_norm_static(x, weight, eps, scale, group_size, residual), half(x, weight, residual), two)


def _pair(dynamic: Any, refuses: Any, static: Any, refuses_static: Any) -> tuple[Baseline, Baseline]:
    """vLLM's two kernels: with a dynamic scale and with a given one."""
    given: dict[str, Any] = {"differs": GIVEN, "unchecked": (1,)}
    return (
        Baseline("vllm", "host", dynamic, ("vllm",), refuses=refuses),
        Baseline("vllm-static", "host", static, ("vllm",), refuses=refuses_static, **given),
    )


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "quantize_fp8": (
        *_pair(_vllm_dynamic, _no_dynamic, _vllm_static, _no_static),
        Baseline("sgl_kernel", "host", _fp8_sgl, ("sgl_kernel",), refuses=_no_sgl),
        inductor("quantize_fp8"),
    ),
    "rms_norm_quant_fp8": (
        *_pair(_vllm_norm(False), _no_norm, _vllm_norm(True), _no_norm_static),
        Baseline(
            "flashinfer",
            "library",
            _flashinfer_norm,
            ("flashinfer",),
            refuses=_no_flashinfer_norm,
            differs=GIVEN,
            unchecked=(1,),
        ),
        inductor("rms_norm_quant_fp8"),
    ),
    "silu_mul_quant_fp8": (
        *_pair(_vllm_silu(False), _no_silu, _vllm_silu(True), _no_silu_static),
        Baseline("sgl_kernel", "host", _sgl_silu, ("sgl_kernel",), refuses=_no_sgl_silu),
        inductor("silu_mul_quant_fp8"),
    ),
}
