"""Linear layer into a residual, y = residual + scale * (x W^T + b): the end of a transformer's attention and MLP.

With a scale for each channel it is LayerScale (arXiv 2103.17239).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Tensor
from fastkernels.core.dispatch import ForOthers, Provider, define
from fastkernels.core.spec import OpSpec, fan_in
from fastkernels.overrides.kit import cublaslt
from fastkernels.overrides.linear.kernels.tiled_linear_cuda import (
    LEAST,
    RESIDUAL,
    for_tiles,
    linear_tiled,
    supports_tiled,
)
from fastkernels.overrides.linear.modules import plain_linear


def reference(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """residual: [..., N]; x: [..., K]; weight: [N, K]; bias, scale: [N] or None.

    Returns [..., N] in x's dtype, computed in at least float32 and rounded once.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc) @ weight.to(acc).t()
    if bias is not None:
        y = y + bias.to(acc)
    return (residual.to(acc) + (y if scale is None else scale.to(acc) * y)).to(x.dtype)


def _check(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_residual: weight {tuple(weight.shape)} is not [N, {x.shape[-1]}] of x {tuple(x.shape)}"
        )
    n = weight.shape[0]
    if residual.shape != (*x.shape[:-1], n):
        raise ValueError(
            f"linear_residual: residual {tuple(residual.shape)} is not {(*x.shape[:-1], n)}, as the product"
        )
    for name, t in (("bias", bias), ("scale", scale)):
        if t is not None and t.shape != (n,):
            raise ValueError(f"linear_residual: {name} {tuple(t.shape)} is not [{n}]")


def supports(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why the tiled kernel does not support this call, None if it does."""
    if x.numel() < LEAST * x.shape[-1]:
        return ForOthers(f"fewer than {LEAST} tokens")
    if _is_long(weight.shape[1], x, scale is not None):
        return ForOthers("long sums of few tokens")
    for t in (residual, scale):
        if t is not None and (t.dtype != x.dtype or (t.is_contiguous() and t.data_ptr() % 16)):
            return ForOthers(f"residual or scale is {t.dtype}, x {x.dtype}, or does not begin at 16 bytes")
    reason = supports_tiled(x, weight, bias)
    return None if reason is None else ForOthers(reason)


def _tiled(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One kernel: bias, scale and residual are added to the float32 sums, while the next tile is multiplied."""
    _check(residual, x, weight, bias, scale)
    return linear_tiled(x, weight, bias, RESIDUAL, scale, residual)


def _supports_cublaslt(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    return None if scale is None else ForOthers("cuBLASLt has no scale for each column")


def _cublaslt(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One kernel, if cuBLASLt has one for these tensors."""
    _check(residual, x, weight, bias, scale)
    n, k = weight.shape
    out = x.new_empty(residual.shape)
    if cublaslt.multiply(x.reshape(-1, k), weight, bias, out.view(-1, n), residual.reshape(-1, n)):
        return out
    return _torch(residual, x, weight, bias)


def _torch(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(residual, x, weight, bias, scale)
    y = F.linear(x, weight, bias)
    return (residual + y if scale is None else torch.addcmul(residual, scale, y)).contiguous()


def _reference(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(residual, x, weight, bias, scale)
    return reference(residual, x, weight, bias, scale).contiguous()


linear_residual = define(
    "linear_residual(Tensor residual, Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None) -> Tensor",
    fake=lambda residual, x, weight, bias=None, scale=None: x.new_empty(residual.shape),
    providers=(
        Provider("cuda-tiled", _tiled, supports=supports),
        Provider("cublaslt", _cublaslt, supports=_supports_cublaslt),
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


LONG, LONG_SCALED, FEW = 3072, 4096, 4096  # columns of x at least, without and with a scale; tokens below


def _is_long(k: int, x: torch.Tensor, scaled: bool) -> bool:
    """Whether sums are long and tokens few: cuBLAS and a pass, or cuBLASLt, which adds a residual itself, were faster.

    H100, 2026-11-28: 1,029 tokens, K = 4,096, N = 1,024: 25.4 us, cuBLAS 17.0 and 2.4 for the pass. 1,024 tokens, K =
    4,304, N = 1,152, without a scale: 36.5 us, cuBLASLt 21.0. 257 tokens, K = 2,048, N = 768: 6.8 us, cuBLASLt 7.9.
    """
    return k >= (LONG_SCALED if scaled else LONG) and x.numel() < FEW * x.shape[-1]


def adds(linear: Any, x: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Whether the op is for residual + scale * linear(x): a plain layer of 16-bit numbers, and many tokens."""
    if scale is not None and (_is_long(linear.in_features, x, True) or scale.dtype != x.dtype):
        return False
    return plain_linear(linear, x) and for_tiles(linear, x)


def _case(
    name: str, tokens: int, k: int, n: int, tag: str = "odd", dtype: str = "bfloat16", bias: bool = True,
    scale: bool = True,
) -> Case:  # fmt: skip
    dims = {"tokens": tokens, "k": k, "n": n, "bias": bias, "scale": scale}
    return Case(name, dims, dtype, 1, (tag,))


SPEC = OpSpec(
    name="linear_residual",
    level=2,
    reference=reference,
    op=linear_residual,
    cases=(  # attention and MLP of DINOv3 ViT-L at 256 px, MLP of ViT-B/16
        _case("dinov3_proj", 2088, 1024, 1024, "model"),
        _case("dinov3_mlp", 2088, 4096, 1024, "model"),
        _case("vit_mlp", 1576, 3072, 768, "model", scale=False),
        _case("one", 1, 1, 1, dtype="float32"),
        _case("scale_of_one", 1, 8, 1, scale=False),
        _case("of_63", 63, 72, 130),
        _case("of_65", 65, 136, 72, bias=False),
        _case("of_150", 150, 200, 104, dtype="float16"),
        _case("without_bias", 5, 129, 40, bias=False),
        _case("sum", 17, 64, 1000, dtype="float32", bias=False, scale=False),
    ),
    arguments=(
        Tensor("residual", "tokens n"),
        Tensor("x", "tokens k"),
        Tensor("weight", "n k", values=fan_in),
        Tensor("bias", "n", when="bias", std=0.1),
        Tensor("scale", "n", when="scale"),
    ),
    outputs=(Tensor("out", "tokens n"),),
    axes={
        "tokens": Axis.per_call(),
        "k": Axis.width(),
        "n": Axis.width(),
        "bias": Axis.option(True, stated=True),
        "scale": Axis.option(True, stated=True),
    },
    flops="2 * tokens * n * k + 2 * tokens * n",
    activations=("residual", "x"),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5),
        "float16": Tolerance(4e-3, 4e-3),
        "bfloat16": Tolerance(3e-2, 3e-2),
    },
    stands_for=("linear", "gated_residual"),
)  # fmt: skip
