"""Baselines of this family: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, Function, aligned, dense, filled, first, half, inductor
from fastkernels.overrides.kit.libraries import (
    GPU_AND_CPU,
    T,
    empty_as,
    from_flashinfer,
    from_sglang,
    from_torch,
    from_vllm,
    vllm_ops,
    whole_vectors,
)


def _half_width(x: T) -> T:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def _activation(name: str, other: str = "") -> Any:
    """A gated activation of vLLM; `other` is its kernel for approximate='tanh'."""

    def make() -> Function:
        c = vllm_ops()
        plain, tanh = getattr(c, name), getattr(c, other or name)

        def act_and_mul(x: T, approximate: str = "none") -> T:
            out = _half_width(x)
            (tanh if approximate == "tanh" else plain)(out, x)
            return out

        return act_and_mul

    return make


def _rows(x: T, *_: Any) -> str | None:
    return first(dense(x), filled(x), whole_vectors(x, x.shape[-1] // 2))


def _unary(name: str) -> Any:
    def make() -> Function:
        kernel = getattr(vllm_ops(), name)

        def activation(x: T, *_: Any) -> T:
            out = empty_as(x)
            kernel(out, x)
            return out

        return activation

    return make


def _gelu_new() -> Function:
    kernel = _unary("gelu_new")()
    return lambda x, approximate="none": kernel(x)


def _no_gelu_new(x: T, approximate: str = "none") -> str | None:
    return _rows(x) if approximate == "tanh" else "vLLM's kernel is the one with tanh"


def _sglang_act_and_mul(name: str, other: str = "") -> Any:
    def make() -> Function:
        import sglang.jit_kernel.activation as activation

        plain, tanh = getattr(activation, name), getattr(activation, other or name)

        def act_and_mul(x: T, approximate: str = "none") -> T:
            out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
            (tanh if approximate == "tanh" else plain)(x, out)
            return out

        return act_and_mul

    return make


def _sglang_no_act(x: T, *_: Any) -> str | None:
    return first(half(x), dense(x), filled(x), aligned(x, 64))


def _swigluoai_and_mul() -> Function:
    vllm_ops()

    def swigluoai_and_mul(x: T, alpha: float = 1.702, limit: float = 7.0) -> T:
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        torch.ops._C.swigluoai_and_mul(out, x, alpha, limit)
        return out

    return swigluoai_and_mul


def _relu2() -> Function:
    from sglang.jit_kernel.activation import relu2

    return lambda x: relu2(x)


def _flashinfer_act_and_mul(name: str, other: str = "") -> Any:
    def make() -> Function:
        import flashinfer.activation as activation

        plain, tanh = getattr(activation, name), getattr(activation, other or name)

        def act_and_mul(x: T, approximate: str = "none") -> T:
            return (tanh if approximate == "tanh" else plain)(x)

        return act_and_mul

    return make


def _flashinfer_no_act(x: T, *_: Any) -> str | None:
    return first(half(x), dense(x), filled(x), aligned(x, 32))


def _gelu(x: T, approximate: str = "none") -> T:
    return F.gelu(x, approximate=approximate)


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "gelu": (
        from_vllm(_gelu_new, _no_gelu_new),
        *from_torch(_gelu),
        inductor("gelu"),
    ),
    "gelu_and_mul": (
        from_vllm(_activation("gelu_and_mul", "gelu_tanh_and_mul"), _rows, devices=GPU_AND_CPU),
        from_sglang(_sglang_act_and_mul("gelu_and_mul", "gelu_tanh_and_mul"), _sglang_no_act),
        from_flashinfer(_flashinfer_act_and_mul("gelu_and_mul", "gelu_tanh_and_mul"), _flashinfer_no_act),
        inductor("gelu_and_mul"),
    ),
    "quick_gelu": (
        from_vllm(_unary("gelu_quick"), _rows),
        inductor("quick_gelu"),
    ),
    "relu2": (
        from_vllm(_unary("relu_squared"), _rows),
        from_sglang(_relu2, _sglang_no_act),
        inductor("relu2"),
    ),
    "silu_and_mul": (
        from_vllm(_activation("silu_and_mul"), _rows, devices=GPU_AND_CPU),
        from_sglang(_sglang_act_and_mul("silu_and_mul"), _sglang_no_act),
        from_flashinfer(_flashinfer_act_and_mul("silu_and_mul"), _flashinfer_no_act),
        inductor("silu_and_mul"),
    ),
    "silu_and_mul_grad": (inductor("silu_and_mul_grad"),),
    "swigluoai_and_mul": (
        from_vllm(_swigluoai_and_mul, _rows),
        inductor("swigluoai_and_mul"),
    ),
}
