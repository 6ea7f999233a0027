"""Gradient of the input of RMSNorm, y = x r w with r = 1 / sqrt(mean(x^2) + eps):

dx = r (w dy) - x r^3 mean(x w dy)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

T = torch.Tensor
WIDEST = 65536  # columns of a program


def reference(x: T, grad: T, weight: T, eps: float = 1e-6) -> T:
    """x, grad: [..., H]; weight: [H]. Computed in at least float32; returns the gradient of x in its dtype."""
    _check(x, grad, weight)
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = grad.to(h.dtype) * weight.to(h.dtype)
    r = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (r * scaled - h * r.pow(3) * (h * scaled).mean(-1, keepdim=True)).to(x.dtype)


@triton.jit
def _rms_norm_grad_kernel(
    x_ptr, grad_ptr, w_ptr, out_ptr, H, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    x = tl.load(x_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(grad_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32)
    d *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / H + eps)
    out = r * d - x * (r * r * r * (tl.sum(x * d, axis=0) / H))
    tl.store(out_ptr + row * H + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def _check(x: T, grad: T, weight: T) -> None:
    if x.dim() == 0 or grad.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm_grad: x {tuple(x.shape)} and grad {tuple(grad.shape)} must be [..., H], and weight"
            f" {tuple(weight.shape)} [H]"
        )


def _supports_triton(x: T, grad: T, weight: T, eps: float = 1e-6) -> str | None:
    for name, t in (("x", x), ("grad", grad), ("weight", weight)):
        if t.dtype not in FLOATS:
            return f"{name} is {t.dtype}, not float16, bfloat16 or float32"
    return f"last dimension {x.shape[-1]} is over {WIDEST}" if x.shape[-1] > WIDEST else None


def _triton(x: T, grad: T, weight: T, eps: float = 1e-6) -> T:
    _check(x, grad, weight)
    x, grad, weight = x.contiguous(), grad.contiguous(), weight.contiguous()
    out = _fake(x, grad, weight)
    if out.numel():
        size = x.shape[-1]
        block = next_power_of_2(size)
        launch_kernel(
            _rms_norm_grad_kernel, (x.numel() // size,), x, grad, weight, out, size, eps, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out


def _fake(x: T, grad: T, weight: T, eps: float = 1e-6) -> T:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


rms_norm_grad = define(
    "rms_norm_grad(Tensor x, Tensor grad, Tensor weight, float eps=1e-6) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _odd(name: str, tokens: int, hidden: int, dtype: str = "bfloat16", **more: int) -> Case:
    return Case(name, {"tokens": tokens, "hidden": hidden, **more}, dtype, tags=("odd",))


SPEC = OpSpec(
    name="rms_norm_grad",
    level=1,
    reference=reference,
    op=rms_norm_grad,
    arguments=(
        Tensor("x", "tokens heads? hidden"),
        Tensor("grad", "tokens heads? hidden"),
        Tensor("weight", "hidden", std=0.2, mean=1.0),
        Scalar("eps", default=1e-6),
    ),
    outputs=(Tensor("dx", "tokens heads? hidden"),),
    axes={"tokens": Axis.per_call(), "heads": Axis.count(), "hidden": Axis.width()},
    flops="9 * tokens * heads * hidden",
    cases=(
        Case("ttt_1k", {"tokens": 1024, "hidden": 2560}, weight=40, tags=("model",)),  # a chunk of TTT-E2E 3B
        Case("ttt_heads", {"tokens": 1024, "heads": 32, "hidden": 80}, weight=14, tags=("model",)),
        _odd("one", 1, 1, "float32"),
        _odd("odd_63", 63, 100),
        _odd("odd_1128", 3, 1128, "float16"),
        _odd("odd_257", 5, 257, "float32"),
        _odd("heads", 7, 33, heads=3),
        _odd("heads_full", 4, 64, "float32", heads=5),
        _odd("wide", 2, 5001, "float16"),
    ),
    activations=("x", "grad"),
    batch_invariant=True,  # a row is in one program
)
