"""Liger-Kernel's Triton kernels as candidates: the forward functions of `liger_kernel.ops`.

Their autograd functions, which call them, make each argument contiguous first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fk_bench.evaluate.adapters.published import need, refuse

PACKAGE = "liger_kernel"


def bind(folder: Path, op: str) -> Callable[..., Any]:
    """The op's function on the library's kernel."""
    return FUNCTIONS[op]()


def _rms_norm() -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
        refuse(residual=residual, var_hidden_size=var_hidden_size)
        need(weight=weight)
        casting = "llama" if cast_x_before_out_mul else "gemma"
        return rms_norm_forward(x.contiguous(), weight, eps, 0.0, casting, None)[0]

    return rms_norm


def _gemma_rms_norm() -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def gemma_rms_norm(x, weight, eps, residual=None):
        refuse(residual=residual)
        return rms_norm_forward(x.contiguous(), weight, eps, 1.0, "gemma", None)[0]

    return gemma_rms_norm


def _layer_norm() -> Callable[..., Any]:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    def layer_norm(x, weight, bias, eps):
        need(weight=weight, bias=bias)
        return layer_norm_forward(x.contiguous(), weight, bias, eps)[0]

    return layer_norm


def _silu_and_mul() -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import swiglu_forward

    def silu_and_mul(x):
        gate, up = x.chunk(2, dim=-1)
        return swiglu_forward(gate.contiguous(), up.contiguous())[2]  # the kernel takes two dense halves

    return silu_and_mul


def _gelu_and_mul() -> Callable[..., Any]:
    from liger_kernel.ops.geglu import geglu_forward

    def gelu_and_mul(x, approximate="none"):
        refuse(approximate=approximate if approximate != "tanh" else None)
        gate, up = x.chunk(2, dim=-1)
        return geglu_forward(gate.contiguous(), up.contiguous())[2]

    return gelu_and_mul


FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "rms_norm": _rms_norm, "gemma_rms_norm": _gemma_rms_norm, "layer_norm": _layer_norm,
    "silu_and_mul": _silu_and_mul, "gelu_and_mul": _gelu_and_mul,
}  # fmt: skip
