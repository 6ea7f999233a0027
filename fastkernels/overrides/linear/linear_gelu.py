"""Linear layer with GELU, y = gelu(x W^T + b), the first half of a transformer's MLP (arXiv 1606.08415)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Scalar, Tensor
from fastkernels.core.dispatch import ForOthers, Provider, define
from fastkernels.core.spec import OpSpec, fan_in
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.kit.cublaslt import gelu_product
from fastkernels.overrides.kit.rows import FLOATS
from fastkernels.overrides.linear.kernels.tiled_linear_cuda import (
    GELU,
    GELU_TANH,
    LEAST,
    linear_tiled,
    supports_tiled,
)
from fastkernels.overrides.linear.modules import plain_linear


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none"
) -> torch.Tensor:
    """x: [..., K]; weight: [N, K]; bias: [N] or None; approximate: 'none' (erf) or 'tanh'.

    Returns [..., N] in x's dtype, computed in at least float32 and rounded once.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc) @ weight.to(acc).t()
    if bias is not None:
        y = y + bias.to(acc)
    return F.gelu(y, approximate=approximate).to(x.dtype)


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str
) -> None:  # fmt: skip
    if approximate not in ("none", "tanh"):
        raise ValueError(f"linear_gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_gelu: weight {tuple(weight.shape)} is not [N, {x.shape[-1]}] of x {tuple(x.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_gelu: bias {tuple(bias.shape)} is not [N] of the weight {tuple(weight.shape)}"
        )


def _supports_tiled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none"
) -> str | None:
    if x.numel() < LEAST * x.shape[-1]:
        return ForOthers(f"fewer than {LEAST} tokens")
    reason = supports_tiled(x, weight, bias)
    return None if reason is None else ForOthers(reason)


def _tiled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none"
) -> torch.Tensor:
    """One kernel: bias and activation are computed from the float32 sums, while the next tile is multiplied."""
    _check(x, weight, bias, approximate)
    return linear_tiled(x, weight, bias, GELU if approximate == "none" else GELU_TANH)


def _supports_cublaslt(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none"
) -> str | None:
    if approximate != "tanh":
        return ForOthers("the epilogue of cuBLASLt computes GELU with tanh, not with erf")
    if x.dtype == torch.float32:  # off by 21 units in the last place (H200, CUDA 13, 2026-11-28)
        return ForOthers("the epilogue's tanh is too inexact for float32")
    if bias is None:
        return "PyTorch takes the epilogue with a bias only"
    if x.dtype not in FLOATS or weight.dtype != x.dtype or bias.dtype != x.dtype:
        return f"dtypes {x.dtype}, {weight.dtype}, {bias.dtype} are not one of float16 and bfloat16"
    return None


def _cublaslt(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none"
) -> torch.Tensor:
    """One kernel: bias and activation are the epilogue of the product."""
    _check(x, weight, bias, approximate)
    rows = x.reshape(-1, x.shape[-1])
    y = gelu_product(rows, weight, bias)
    if y is None:
        y = torch.ops.aten._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], -1)


def _torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none"
) -> torch.Tensor:
    _check(x, weight, bias, approximate)
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def _reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none"
) -> torch.Tensor:
    _check(x, weight, bias, approximate)
    return reference(x, weight, bias, approximate).contiguous()


linear_gelu = define(
    'linear_gelu(Tensor x, Tensor weight, Tensor? bias=None, str approximate="none") -> Tensor',
    fake=lambda x, weight, bias=None, approximate="none": x.new_empty((*x.shape[:-1], weight.shape[0])),
    providers=(
        Provider("cublaslt", _cublaslt, supports=_supports_cublaslt),
        Provider("cuda-tiled", _tiled, supports=_supports_tiled),
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def has_epilogue(linear: Any) -> bool:
    """Whether the tiled kernel, whose epilogue is GELU with erf, runs with a layer's weight."""
    return supports_tiled(linear.weight[:0], linear.weight, linear.bias) is None


def activated_erf(linear: Any, act: Any, x: torch.Tensor) -> torch.Tensor:
    """act(linear(x)), where act is GELU with erf: one op of a plain layer and many tokens.

    Of few tokens, a compiler fuses GELU as well as we do. An adapter or a hook may have come since a patch.
    """
    if x.numel() < LEAST * x.shape[-1] or not plain_linear(linear, x):
        return act(linear(x))
    return linear_gelu(x, linear.weight, linear.bias, "none")


def fuses(linear: Any, x: torch.Tensor) -> bool:
    """Whether the op runs in place of linear(x) and GELU with tanh: a plain layer with a bias, `gelu` not requested."""
    named = linear_gelu.requested == "named" or not (linear_gelu.requested or gelu.requested)
    return named and plain_linear(linear, x) and linear.bias is not None


def _case(
    name: str, tokens: int, k: int, n: int, approximate: str, tag: str = "odd", dtype: str = "bfloat16",
    bias: bool = True,
) -> Case:  # fmt: skip
    dims = {"tokens": tokens, "k": k, "n": n, "approximate": approximate}
    return Case(name, dims if bias else {**dims, "bias": False}, dtype, 1, (tag,))


SPEC = OpSpec(
    name="linear_gelu",
    level=2,
    reference=reference,
    op=linear_gelu,
    cases=(  # SigLIP 2 so400m at 256 px, FLUX.1 at 1024 px, Whisper large-v3's encoder
        _case("siglip_1", 256, 1152, 4304, "tanh", "model"),
        _case("siglip_32", 8192, 1152, 4304, "tanh", "model"),
        _case("flux", 4096, 3072, 12288, "tanh", "model"),
        _case("whisper", 1500, 1280, 5120, "none", "model"),
        _case("one", 1, 1, 1, "none", dtype="float32"),
        _case("tanh_one", 1, 1, 1, "tanh", dtype="float32"),
        _case("tanh_63", 63, 72, 130, "tanh"),
        _case("erf_65", 65, 100, 63, "none", dtype="float16"),
        _case("tanh_9", 9, 33, 257, "tanh", dtype="float32"),
        _case("without_bias", 5, 129, 40, "tanh", bias=False),
        _case("erf_17", 17, 64, 1000, "none", dtype="float32", bias=False),
    ),
    arguments=(
        Tensor("x", "tokens k"),
        Tensor("weight", "n k", values=fan_in),
        Tensor("bias", "n", when="bias", std=0.1),
        Scalar("approximate"),
    ),
    outputs=(Tensor("out", "tokens n"),),
    axes={
        "tokens": Axis.per_call(),
        "k": Axis.width(),
        "n": Axis.width(),
        "approximate": Axis.option("none", stated=True),
        "bias": Axis.option(True, stated=True),
    },
    flops="2 * tokens * n * k + 10 * tokens * n",
    activations=("x",),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
    },
    stands_for=("linear", "gelu"),
)  # fmt: skip
