"""Mean over sequences of outer products, projected to pairs: Algorithm 9 of AlphaFold 3's supplement."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Scalar, Tensor, fan_in
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.structure.pairs import close

T = torch.Tensor
CHUNK = 1 << 26  # numbers of outer products that are in memory at once


def reference(a: T, b: T, mask: T, weight: T, bias: T, eps: float = 1e-3) -> T:
    """a, b: [B, S, N, C]; mask: [B, S, N]; weight: [Z, C * C]; bias: [Z]. Returns [B, N, N, Z] in a's dtype.

    The result of tokens i and j is (weight o + bias) / (n + eps), where o is the sum over sequences of
    mask a_i (x) mask b_j, flattened, and n the number of sequences that have both. Computed in at least float32.
    """
    _check(a, b, mask, weight, bias)
    acc = torch.promote_types(a.dtype, torch.float32)
    seen = mask.to(acc)
    one, other = a.to(acc) * seen[..., None], b.to(acc) * seen[..., None]
    outer = torch.einsum("bsic,bsjd->bijcd", one, other).flatten(3)
    count = torch.einsum("bsi,bsj->bij", seen, seen)[..., None]
    return (F.linear(outer, weight.to(acc), bias.to(acc)) / (count + eps)).to(a.dtype)


def _check(a: T, b: T, mask: T, weight: T, bias: T) -> None:
    if a.dim() != 4 or a.shape != b.shape or mask.shape != a.shape[:3]:
        raise ValueError(
            f"outer_product_mean: a and b must be [B, S, N, C] and mask [B, S, N], got {tuple(a.shape)},"
            f" {tuple(b.shape)} and {tuple(mask.shape)}"
        )
    if weight.shape != (*bias.shape, a.shape[3] ** 2):
        raise ValueError(
            f"outer_product_mean: weight must be [Z, {a.shape[3] ** 2}] and bias [Z], got {tuple(weight.shape)} and"
            f" {tuple(bias.shape)}"
        )


def by_gemm(a: T, b: T, mask: T, weight: T, bias: T, eps: float = 1e-3) -> T:
    """Two matrix products for some tokens at a time; with few sequences, the projection comes first."""
    _check(a, b, mask, weight, bias)
    (batch, depth, n, c), z = a.shape, len(bias)
    out = a.new_empty(batch, n, n, z)
    seen = mask.to(a.dtype)[..., None]
    one, other = a * seen, b * seen
    for i in range(batch):
        x = one[i].permute(1, 2, 0)  # [N, C, S]
        if (
            depth < c
        ):  # weight b_j for each sequence, then a matrix product with a_i: [N (j), S, Z, C] is small
            y = torch.matmul(
                other[i].reshape(depth * n, c), weight.reshape(z * c, c).t()
            )  # of sequence and token j
            y = y.view(depth, n, z, c).permute(3, 0, 1, 2).reshape(c * depth, n * z)
            torch.addmm(bias.repeat(n), x.reshape(n, c * depth), y, out=out[i].view(n, n * z))
        else:
            y = other[i].reshape(depth, n * c)
            step = max(CHUNK // (n * c * c), 1)
            for first in range(0, n, step):
                part = x[first : first + step]
                outer = torch.matmul(part.reshape(-1, depth), y).view(len(part), c, n, c)
                outer = outer.transpose(1, 2).reshape(len(part) * n, c * c)
                torch.addmm(bias, outer, weight.t(), out=out[i, first : first + step].view(-1, z))
    count = torch.einsum("bsi,bsj->bij", seen[..., 0].float(), seen[..., 0].float())[..., None]
    return out.div_(count + eps)


outer_product_mean = define(
    "outer_product_mean(Tensor a, Tensor b, Tensor mask, Tensor weight, Tensor bias, float eps=1e-3) -> Tensor",
    fake=lambda a, b, mask, weight, *args, **kwargs: a.new_empty(
        a.shape[0], a.shape[2], a.shape[2], weight.shape[0]
    ),
    providers=(
        Provider("linear", by_gemm),
        Provider("torch", by_gemm, devices=("cpu",)),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str,
    tag: str,
    depth: int,
    n: int,
    c: int,
    z: int,
    dtype: str = "bfloat16",
    weight: float = 1,
    batch: int = 1,
) -> Case:
    dims = {"batch": batch, "depth": depth, "tokens": n, "c": c, "z": z}
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="outer_product_mean",
    level=2,
    reference=reference,
    op=outer_product_mean,
    cases=(  # OpenFold3: 4 blocks of the MSA module; one sequence without an alignment, else up to 1,024
        *(_case(f"alone_{n}", "model", 1, n, 32, 128, weight=4) for n in (150, 400, 700)),
        *(_case(f"aligned_{n}", "model", 1024, n, 32, 128, weight=4) for n in (150, 400, 700)),
        _case("one", "odd", 1, 1, 1, 1, "float32"),
        _case("few", "odd", 3, 7, 8, 12, "float32", batch=2),
        _case("many", "odd", 20, 9, 8, 16, "float32"),
        _case("odd_5", "odd", 2, 5, 3, 7, "float32"),
        _case("equal", "odd", 4, 6, 4, 8, "float16"),
        _case("half", "odd", 9, 10, 4, 24, "float16"),
        _case("odd_bf16", "odd", 2, 12, 16, 64),
    ),
    arguments=(
        Tensor("a", "batch depth tokens c"),
        Tensor("b", "batch depth tokens c"),
        Tensor("mask", "batch depth tokens", values=lambda call, shape, dtype: (call.rand(*shape) < 0.9).to(dtype)),
        Tensor("weight", "z c**2", values=fan_in),
        Tensor("bias", "z", std=0.1),
        Scalar("eps", default=1e-3),
    ),
    outputs=(Tensor("out", "batch tokens tokens z"),),
    axes={
        "batch": Axis.per_call(draw=None),
        "depth": Axis.per_call(draw=None),
        "tokens": Axis.per_call(draw=close),
        "c": Axis.option(32),
        "z": Axis.width(),
    },
    flops="2 * batch * tokens * tokens * c * c * (min(depth, c) + z)",
    tolerance={
        "float32": Tolerance(1e-4, 1e-4), "float16": Tolerance(1e-2, 1e-2), "bfloat16": Tolerance(6e-2, 6e-2),
    },
)  # fmt: skip
