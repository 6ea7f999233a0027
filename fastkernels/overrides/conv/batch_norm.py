"""Batch normalization with stored statistics, as at inference (Ioffe and Szegedy, arXiv 1502.03167)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS, unsupported_vector

TILE = 1024  # elements of a program


def reference(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """x: [B, C, ...]; mean, var: [C]; weight, bias: [C] or None. Computed in at least float32, rounded once."""
    _check(x, mean, var, weight, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    shape = (-1, *[1] * (x.dim() - 2))
    y = (x.to(acc) - mean.to(acc).view(shape)) * torch.rsqrt(var.to(acc) + eps).view(shape)
    y = y if weight is None else y * weight.to(acc).view(shape)
    y = y if bias is None else y + bias.to(acc).view(shape)
    return y.to(x.dtype)


def _check(x: torch.Tensor, *vectors: torch.Tensor | None) -> None:
    for t in vectors:
        if t is not None and (x.dim() < 2 or t.shape != x.shape[1:2]):
            raise ValueError(
                f"batch_norm: x {tuple(x.shape)} must be [B, C, ...], and all vectors [C], got {tuple(t.shape)}"
            )


@triton.jit
def _batch_norm_kernel(
    x_ptr, mean_ptr, var_ptr, w_ptr, b_ptr, out_ptr, n, C, P, eps, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    channel = (at // P) % C
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.load(var_ptr + channel, mask=inside, other=1.0).to(tl.float32) + eps)
    if HAS_W:
        scale *= tl.load(w_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    y = (x.to(tl.float32) - tl.load(mean_ptr + channel, mask=inside, other=0.0).to(tl.float32)) * scale
    if HAS_B:
        y += tl.load(b_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(x.dtype), mask=inside)


def _supports_triton(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *_: object,
) -> str | None:  # fmt: skip
    if x.dtype not in FLOATS:
        return f"x has dtype {x.dtype}, not float16, bfloat16 or float32"
    named = {"mean": mean, "var": var, "weight": weight, "bias": bias}
    return next((why for name, t in named.items() if (why := unsupported_vector(t, name))), None)


def _triton(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    _check(x, mean, var, weight, bias)
    given = x.contiguous()
    out = torch.empty_like(given)
    if out.numel():
        launch_kernel(
            _batch_norm_kernel, (cdiv(x.numel(), TILE),),
            given, mean, var, weight, bias, out, x.numel(), x.shape[1], x.numel() // (x.shape[0] * x.shape[1]), eps,
            HAS_W=weight is not None, HAS_B=bias is not None, TILE=TILE, num_warps=4,
        )  # fmt: skip
    return out


def _torch(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    _check(x, mean, var, weight, bias)
    return F.batch_norm(x, mean, var, weight, bias, eps=eps).contiguous()


batch_norm = define(
    "batch_norm(Tensor x, Tensor mean, Tensor var, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor",
    fake=lambda x, *args, **kwargs: torch.empty_like(x, memory_format=torch.contiguous_format),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


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
        _case("one", "odd", "float32", batch=1, channels=1, rows=1, columns=1),
        _case("sequence", "odd", batch=3, channels=33, rows=1, columns=17),
        _case("odd_63", "odd", batch=2, channels=5, rows=9, columns=7),
        _case("rows", "odd", "float32", batch=65, channels=3, rows=1, columns=1),
        _case("plain", "odd", "float16", batch=3, channels=7, rows=257, columns=1, affine=False),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns", mean=0.5),
        Tensor("mean", "channels", std=0.5),
        Tensor("var", "channels", values=lambda call, shape, dtype: call.rand(*shape).add(0.5).to(dtype)),
        Tensor("weight", "channels", when="affine", mean=1, std=0.1),
        Tensor("bias", "channels", when="affine", std=0.1),
        Scalar("eps", default=1e-5),
    ),
    outputs=(Tensor("out", "batch channels rows columns"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "affine": Axis.option(True, stated=True),
    },
    constructor={"num_features": "channels"},
    flops="4 * batch * channels * rows * columns",
)
