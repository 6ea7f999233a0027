"""SGLang's own CPU code as providers of our ops, for FASTKERNELS_PROVIDER=op:sglang.

It proves a swap where our code is no faster: the same code runs, called through our op and counted there. It is the
class's forward_cpu: sgl_kernel's operators where they are installed, plain PyTorch elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core.dispatch import Provider


def providers() -> Mapping[str, Provider]:
    """{op: provider}."""
    return {
        "rms_norm": Provider("sglang", rms_norm, devices=("cpu",), module="sglang"),
        "silu_and_mul": Provider("sglang", silu_and_mul, devices=("cpu",), module="sglang"),
    }


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None,
    var_hidden_size: int | None = None, cast_x_before_out_mul: bool = True,
) -> torch.Tensor:  # fmt: skip
    from sglang.srt.layers.layernorm import RMSNorm

    hidden = x.shape[-1]
    attributes = SimpleNamespace(
        hidden_size=hidden, variance_epsilon=eps, variance_size_override=var_hidden_size, override_orig_dtype=None,
        cast_x_before_out_mul=cast_x_before_out_mul, fp32_residual=False, has_weight=weight is not None,
        weight=torch.ones(hidden, dtype=x.dtype) if weight is None else weight,
    )  # fmt: skip
    if residual is None:
        return _run(RMSNorm, attributes, x)
    out, new = _run(RMSNorm, attributes, x.clone(), residual)  # some versions overwrite x
    if new is not residual:
        residual.copy_(new)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    from sglang.srt.layers.activation import SiluAndMul

    return _run(SiluAndMul, SimpleNamespace(), x)


def _run(host_class: Any, attributes: SimpleNamespace, *args: Any) -> Any:
    """The host's CPU method on an object that has only the attributes that the method reads."""
    attributes.forward_native = lambda *more: host_class.forward_native(attributes, *more)
    return host_class.forward_cpu(attributes, *args)
