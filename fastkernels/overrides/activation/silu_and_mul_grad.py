"""Gradient of SwiGLU, y = silu(g) * u: dg = dy u silu'(g) and du = dy silu(g), with silu'(g) = s (1 + g (1 - s))."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

T = torch.Tensor


def reference(x: T, grad: T) -> tuple[T, T]:
    """x: [T, 2 * d], gate then up; grad: [T, d]. Returns the gradient of x, and y [T, d], in x's dtype."""
    _check(x, grad)
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    dy, s = grad.to(gate.dtype), gate.sigmoid()
    dx = torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), dim=-1)
    return dx.to(x.dtype), (gate * s * up).to(x.dtype)


@triton.jit
def _silu_and_mul_grad_kernel(
    x_ptr, grad_ptr, dx_ptr, y_ptr, D, n_blocks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    follow(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // n_blocks).to(tl.int64)
    cols = (pid % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    at = row * 2 * D + cols
    gate = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + D, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(grad_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    kind = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + at, (dy * up * s * (1.0 + gate * (1.0 - s))).to(kind), mask=mask)
    tl.store(dx_ptr + at + D, (dy * gate * s).to(kind), mask=mask)
    tl.store(y_ptr + row * D + cols, (gate * s * up).to(kind), mask=mask)


def _check(x: T, grad: T) -> None:
    if x.dim() != 2 or x.shape[1] % 2 or grad.shape != (x.shape[0], x.shape[1] // 2):
        raise ValueError(
            f"silu_and_mul_grad: x must be [T, 2 * d] and grad [T, d], got {tuple(x.shape)} and {tuple(grad.shape)}"
        )


def _supports_triton(x: T, grad: T) -> str | None:
    for name, t in (("x", x), ("grad", grad)):
        if t.dtype not in FLOATS:
            return f"{name} is {t.dtype}, not float16, bfloat16 or float32"
    return None


def _triton(x: T, grad: T) -> tuple[T, T]:
    _check(x, grad)
    x, grad = x.contiguous(), grad.contiguous()
    dx, y = _fake(x, grad)
    tokens, d = y.shape
    if y.numel():
        block = min(next_power_of_2(d), 1024)
        n_blocks = cdiv(d, block)
        launch_kernel(
            _silu_and_mul_grad_kernel, (tokens * n_blocks,), x, grad, dx, y, d, n_blocks, BLOCK=block, num_warps=4
        )  # fmt: skip
    return dx, y


def _fake(x: T, grad: T) -> tuple[T, T]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(
        grad.shape, dtype=x.dtype, device=x.device
    )


silu_and_mul_grad = define(
    "silu_and_mul_grad(Tensor x, Tensor grad) -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _odd(name: str, tokens: int, d: int, dtype: str = "bfloat16") -> Case:
    return Case(name, {"tokens": tokens, "d": d}, dtype, tags=("odd",))


SPEC = OpSpec(
    name="silu_and_mul_grad",
    level=1,
    reference=reference,
    op=silu_and_mul_grad,
    arguments=(Tensor("x", "tokens 2*d", std=2), Tensor("grad", "tokens d")),
    outputs=(Tensor("dx", "tokens 2*d"), Tensor("y", "tokens d")),
    axes={"tokens": Axis.per_call(), "d": Axis.width()},
    flops="12 * tokens * d",
    cases=(
        Case("ttt_1k", {"tokens": 1024, "d": 5632}, weight=8, tags=("model",)),  # a chunk of TTT-E2E 3B
        Case("ttt_small", {"tokens": 1024, "d": 1664}, weight=1, tags=("model",)),  # of 125M
        _odd("one", 1, 1, "float32"),
        _odd("odd_63", 63, 100),
        _odd("odd_1128", 3, 1128, "float16"),
        _odd("wide", 2, 2500, "float32"),
        _odd("narrow", 130, 7, "float16"),
        _odd("odd_257", 5, 257),
        _odd("rows", 17, 64, "float32"),
    ),
    activations=("x", "grad"),
    contained=None,
    batch_invariant=True,  # elementwise
)
