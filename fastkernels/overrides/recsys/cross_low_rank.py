"""Low-rank cross layer of DCN v2 (Wang et al., arXiv 2008.13535): y = x0 * (W (V x) + b) + x."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Tensor, fan_in
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.recsys.cross_layer import add_product, unsupported_product


def reference(
    x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """x0, x: [B, N]; v: [R, N]; w: [N, R]; bias: [N]. Returns x0 * (x v^T w^T + bias) + x, [B, N] in x's dtype.

    x0 is the input of the first layer, x that of this one. Computed in float32 or float64. Raises ValueError for shapes
    that do not fit.
    """
    _check(x0, x, v, w, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    inner = F.linear(F.linear(x.to(acc), v.to(acc)), w.to(acc), bias.to(acc))
    return (x0.to(acc) * inner + x.to(acc)).to(x.dtype)


def _check(x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> None:
    n = x.shape[-1] if x.dim() == 2 else -1
    if x0.shape != x.shape or n < 0:
        raise ValueError(
            f"cross_low_rank: x0 and x must be [B, N], got {tuple(x0.shape)} and {tuple(x.shape)}"
        )
    if v.dim() != 2 or v.shape[1] != n or w.shape != v.shape[::-1] or bias.shape != (n,):
        raise ValueError(
            f"cross_low_rank: for x {tuple(x.shape)}, v must be [R, {n}], w [{n}, R] and bias [{n}], got"
            f" {tuple(v.shape)}, {tuple(w.shape)} and {tuple(bias.shape)}"
        )


def _supports_triton(
    x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> str | None:
    return unsupported_product(x0, x, w, v, bias)


def _triton(
    x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    _check(x0, x, v, w, bias)
    return add_product(x0, x, F.linear(x, v)[:, None], w[None], bias)


def _torch(
    x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    _check(x0, x, v, w, bias)
    return torch.addcmul(x, x0, F.linear(F.linear(x, v), w, bias))


cross_low_rank = define(
    "cross_low_rank(Tensor x0, Tensor x, Tensor v, Tensor w, Tensor bias) -> Tensor",
    fake=lambda x0, x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, tag: str, samples: int, n: int, rank: int, dtype: str = "bfloat16", weight: float = 1
) -> Case:
    return Case(name, {"samples": samples, "n": n, "rank": rank}, dtype, weight, (tag,))


def _ones(args: list[Any]) -> None:
    args[0].fill_(1)


SPEC = OpSpec(
    name="cross_low_rank",
    level=2,
    reference=reference,
    op=cross_low_rank,
    arguments=(
        Tensor("x0", "samples n"),
        Tensor("x", "samples n"),
        Tensor("v", "rank n", values=fan_in),
        Tensor("w", "n rank", values=fan_in),
        Tensor("bias", "n", std=0.1),
    ),
    outputs=(Tensor("out", "samples n"),),
    axes={"samples": Axis.per_call(), "n": Axis.width(), "rank": Axis.width()},
    flops="4 * samples * n * rank",
    cases=(  # DLRMv2: 27 vectors of 128, rank 512
        *(_case(f"dlrm_{b}", "model", b, 3456, 512, weight=w) for b, w in ((1, 16), (32, 16), (2048, 4))),
        *(_case(f"dlrm_{b}_float", "model", b, 3456, 512, "float32", w) for b, w in ((1, 16), (32, 16), (2048, 4))),
        _case("one", "odd", 1, 1, 1, "float32"),
        _case("odd_63", "odd", 63, 72, 9, "float32"),
        _case("odd_half", "odd", 7, 130, 33, "float16"),
        _case("rank_one", "odd", 5, 40, 1, "float32"),
        _case("full_rank", "odd", 20, 48, 48, "float16"),
        _case("odd_bf16", "odd", 33, 96, 17),
        _case("wide", "odd", 3, 300, 65, "float16"),
        _case("none", "odd", 0, 32, 8, "float32"),
    ),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5), "float16": Tolerance(4e-3, 4e-3), "bfloat16": Tolerance(3e-2, 3e-2),
    },
    activations=("x0", "x"),
    extremes={"ones": _ones},
    baseline="torch",
)  # fmt: skip
