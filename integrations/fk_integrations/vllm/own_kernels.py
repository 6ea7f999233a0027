"""vLLM's own CPU kernels as providers of our ops, for FASTKERNELS_PROVIDER=op:vllm.

They prove a swap where our code is no faster: the same kernel runs, called through our op and counted there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastkernels.core.dispatch import Provider

VECTOR = 8  # values that the kernels load at once


def providers() -> Mapping[str, Provider]:
    """{op: provider}. The kernels are vLLM's C++ operators, which its platform has loaded by now."""
    return {
        "rms_norm": Provider("vllm", rms_norm, devices=("cpu",), module="vllm", supports=_supports_rms_norm),
        "silu_and_mul": Provider(
            "vllm", silu_and_mul, devices=("cpu",), module="vllm", supports=_supports_silu
        ),
    }


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None, *_: Any
) -> torch.Tensor:
    x = x.contiguous()
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, eps)
        return out
    out = x.clone()  # the kernel overwrites its input
    torch.ops._C.fused_add_rms_norm(out, residual, weight, eps)
    return out


def _supports_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None,
    var_hidden_size: int | None = None, cast_x_before_out_mul: bool = True,
) -> str | None:  # fmt: skip
    if var_hidden_size is not None:
        return "the kernel has no var_hidden_size"
    if x.shape[-1] % VECTOR:
        return f"hidden size {x.shape[-1]} is not a multiple of {VECTOR}"
    if weight is not None and weight.dtype != x.dtype:
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if residual is not None and not residual.is_contiguous():
        return f"residual has strides {tuple(residual.stride())}, not contiguous"
    return None


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    torch.ops._C.silu_and_mul(out, x)
    return out


def _supports_silu(x: torch.Tensor) -> str | None:
    width = x.shape[-1] // 2
    return f"{width} columns are not a multiple of {VECTOR}" if width % VECTOR else None
