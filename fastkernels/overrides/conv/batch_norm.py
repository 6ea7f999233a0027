"""Batch norm with stored statistics, as at inference, and an activation (Ioffe and Szegedy, arXiv 1502.03167)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.core.assemble import filled, load, make
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.conv.epilogue import (
    Norm,
    Vectors,
    activated,
    apply_epilogue,
    check_activation,
    check_norm,
    dense,
    normalized,
)
from fastkernels.overrides.conv.spatial import unsupported


def reference(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
) -> torch.Tensor:
    """x: [B, C, ...]; mean, var: [C]; weight, bias: [C] or None; activation: see conv/epilogue.py.

    Computed in at least float32, rounded once.
    """
    vectors = mean, var, weight, bias
    _check(x, vectors, activation)
    y = normalized(x.to(torch.promote_types(x.dtype, torch.float32)), vectors, eps)
    return activated(y, activation).to(x.dtype)


def _check(x: torch.Tensor, vectors: Vectors, activation: str) -> None:
    if x.dim() < 2:
        raise ValueError(f"batch_norm: x must be [B, C, ...], got {tuple(x.shape)}")
    check_activation("batch_norm", activation)
    check_norm("batch_norm", x.shape[1], vectors)


def _supports_triton(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, activation: str = "none",
) -> str | None:  # fmt: skip
    return unsupported(x) or Norm(mean, var, weight, bias, eps).unsupported()


def _triton(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, activation: str = "none",
) -> torch.Tensor:  # fmt: skip
    norm, given = Norm(mean, var, weight, bias, eps), dense(x)
    _check(x, norm.vectors, activation)
    return apply_epilogue(given, norm, activation, None, torch.empty_like(given))


def _torch(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, activation: str = "none",
) -> torch.Tensor:  # fmt: skip
    norm = Norm(mean, var, weight, bias, eps)
    _check(x, norm.vectors, activation)
    return activated(norm.by_torch(dense(x)), activation)


def _reference(*args: object) -> torch.Tensor:
    return dense(reference(*args))  # type: ignore[arg-type]


batch_norm = define(
    "batch_norm(Tensor x, Tensor mean, Tensor var, Tensor? weight=None, Tensor? bias=None, float eps=1e-5,"
    ' str activation="none") -> Tensor',
    fake=lambda x, *args, **kwargs: torch.empty_like(dense(x)),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, mean, var, weight, bias, eps, activation = filled(args, 7, None, None, 1e-5, "none")
    module = make(cls, x, x.shape[1], eps, affine=weight is not None, act_layer=None if activation == "none" else
                  activation)  # fmt: skip
    load(module, {"running_mean": mean, "running_var": var, "weight": weight, "bias": bias})
    module.eval()
    return lambda: module(x)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="batch_norm",
    level=1,
    reference=reference,
    op=batch_norm,
    cases=(  # ResNet-50 on 32 images
        _case("resnet_56", "model", weight=7, batch=32, channels=64, rows=56, columns=56),
        _case("resnet_14", "model", weight=12, batch=32, channels=256, rows=14, columns=14),
        _case("resnet_7", "model", weight=3, batch=1, channels=512, rows=7, columns=7),
        _case("mobile_14", "model", weight=3, batch=1, channels=96, rows=14, columns=14),
        _case("mobile_112", "model", batch=32, channels=32, rows=112, columns=112, activation="relu"),
        _case("one", "odd", "float32", batch=1, channels=1, rows=1, columns=1),
        _case("sequence", "odd", batch=3, channels=33, rows=1, columns=17),
        _case("odd_63", "odd", batch=2, channels=5, rows=9, columns=7),
        _case("rows", "odd", "float32", batch=65, channels=3, rows=1, columns=1),
        _case("silu", "odd", "float32", batch=2, channels=7, rows=3, columns=5, activation="silu"),
        _case("hard", "odd", "float16", batch=1, channels=9, rows=7, columns=3, activation="hard_swish"),
        _case("plain", "odd", "float16", batch=3, channels=7, rows=257, columns=1, affine=False),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns", mean=0.5),
        Tensor("mean", "channels", std=0.5),
        Tensor("var", "channels", values=lambda call, shape, dtype: call.rand(*shape).add(0.5).to(dtype)),
        Tensor("weight", "channels", when="affine", mean=1, std=0.1),
        Tensor("bias", "channels", when="affine", std=0.1),
        Scalar("eps", default=1e-5),
        Scalar("activation"),
    ),
    outputs=(Tensor("out", "batch channels rows columns"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "affine": Axis.option(True, stated=True),
        "activation": Axis.option("none"),
    },
    build=_build,
    flops="4 * batch * channels * rows * columns",
)
