"""Transition layer, a norm and a SwiGLU MLP in one: Algorithm 11 of AlphaFold 3's supplement."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Scalar, Tensor, fan_in
from fastkernels.core.dispatch import ForOthers, Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 128  # channels: a block of rows stays in registers
T = torch.Tensor


def reference(
    x: T, norm_weight: T, norm_bias: T, a_weight: T, b_weight: T, out_weight: T, eps: float = 1e-5
) -> T:
    """x: [..., C]; norm_weight, norm_bias: [C]; a_weight, b_weight: [H, C]; out_weight: [C, H].

    Returns out_weight (silu(a_weight y) * (b_weight y)) with y = layer_norm(x), in x's dtype and shape. Computed in at
    least float32.
    """
    _check(x, a_weight, b_weight, out_weight)
    acc = torch.promote_types(x.dtype, torch.float32)
    y = F.layer_norm(x.to(acc), x.shape[-1:], norm_weight.to(acc), norm_bias.to(acc), eps)
    hidden = F.silu(F.linear(y, a_weight.to(acc))) * F.linear(y, b_weight.to(acc))
    return F.linear(hidden, out_weight.to(acc)).to(x.dtype)


def _check(x: T, a: T, b: T, out: T) -> None:
    if a.dim() != 2 or a.shape != b.shape or a.shape[1] != x.shape[-1] or out.shape != a.shape[::-1]:
        raise ValueError(
            f"swiglu_transition: for x {tuple(x.shape)}, a_weight and b_weight must be [H, C] and out_weight [C, H],"
            f" got {tuple(a.shape)}, {tuple(b.shape)} and {tuple(out.shape)}"
        )


@triton.jit(do_not_specialize=["M"])
def _swiglu_transition_kernel(
    x_ptr, w_ptr, bias_ptr, a_ptr, b_ptr, o_ptr, out_ptr, M, C, H, eps, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per block of rows: the hidden channels are computed a block at a time and go into no memory.
    follow(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_C)
    here, inside = rows < M, cols < C
    at = rows[:, None] * C + cols[None, :]
    both = here[:, None] & inside[None, :]
    x = tl.load(x_ptr + at, mask=both, other=0.0)
    h = x.to(tl.float32)
    centered = tl.where(inside[None, :], h - (tl.sum(h, 1) / C)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 1) / C + eps)
    w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    y = (centered * scale[:, None] * w[None, :] + bias[None, :]).to(x.dtype)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for first in range(0, H, BLOCK_H):
        hidden = first + tl.arange(0, BLOCK_H)
        known = hidden < H
        weight_at = hidden[:, None] * C + cols[None, :]
        there = known[:, None] & inside[None, :]
        a = tl.dot(y, tl.trans(tl.load(a_ptr + weight_at, mask=there, other=0.0)), input_precision=PRECISION)
        b = tl.dot(y, tl.trans(tl.load(b_ptr + weight_at, mask=there, other=0.0)), input_precision=PRECISION)
        value = (a / (1.0 + tl.exp(-a)) * b).to(x.dtype)
        out_at = o_ptr + cols[:, None] * H + hidden[None, :]
        out = tl.load(out_at, mask=inside[:, None] & known[None, :], other=0.0)
        acc = tl.dot(value, tl.trans(out), acc, input_precision=PRECISION)
    tl.store(out_ptr + at, acc.to(x.dtype), mask=both)


def _supports_triton(
    x: T, norm_weight: T, norm_bias: T, a_weight: T, b_weight: T, out_weight: T, eps: float = 1e-5
) -> str | None:
    given = (x, norm_weight, norm_bias, a_weight, b_weight, out_weight)
    if x.dtype not in FLOATS or any(t.dtype != x.dtype for t in given):
        return f"x is {x.dtype}, and x and the weights are not all float16, all bfloat16 or all float32"
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if x.shape[-1] > WIDEST:
        return ForOthers(f"{x.shape[-1]} channels are over {WIDEST}: cuBLAS multiplies wide layers")
    if not all(t.is_contiguous() for t in given):
        return "x or a weight is not contiguous"
    return None


def _triton(
    x: T, norm_weight: T, norm_bias: T, a_weight: T, b_weight: T, out_weight: T, eps: float = 1e-5
) -> T:
    _check(x, a_weight, b_weight, out_weight)
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    hidden, width = a_weight.shape
    rows, single = x.numel() // width, x.dtype == torch.float32
    block_m = 32 if single else 128 if rows >= 4096 else 32
    exact = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch_kernel(
        _swiglu_transition_kernel, (cdiv(rows, block_m),),
        x, norm_weight, norm_bias, a_weight, b_weight, out_weight, out, rows, width,
        hidden, eps, PRECISION=exact if single else "tf32", BLOCK_M=block_m,
        BLOCK_C=max(next_power_of_2(width), 16), BLOCK_H=32 if single else 64, num_warps=8 if block_m == 128 else 4,
        num_stages=2,
    )  # fmt: skip
    return out


def by_torch(
    x: T, norm_weight: T, norm_bias: T, a_weight: T, b_weight: T, out_weight: T, eps: float = 1e-5
) -> T:
    _check(x, a_weight, b_weight, out_weight)
    y = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    return F.linear(F.silu(F.linear(y, a_weight)).mul_(F.linear(y, b_weight)), out_weight)


swiglu_transition = define(
    "swiglu_transition(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor a_weight, Tensor b_weight,"
    " Tensor out_weight, float eps=1e-5) -> Tensor",
    fake=lambda x, *args, **kwargs: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", by_torch, devices=("cuda", "cpu")),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, tag: str, tokens: int, width: int, hidden: int, dtype: str = "bfloat16", weight: float = 1
) -> Case:
    return Case(name, {"tokens": tokens, "width": width, "hidden": hidden}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="swiglu_transition",
    level=2,
    reference=reference,
    op=swiglu_transition,
    cases=(  # OpenFold3: pairs of 150, 400 and 700 tokens, and the tokens themselves
        *(_case(f"pairs_{n}", "model", n * n, 128, 512, weight=52) for n in (150, 400, 700)),
        _case("single_400", "model", 400, 384, 1536, weight=48),
        _case("one", "odd", 1, 16, 16, "float32"),
        _case("odd_63", "odd", 63, 24, 50, "float32"),
        _case("half", "odd", 40, 128, 100, "float16"),
        _case("odd_bf16", "odd", 33, 64, 256),
        _case("wide", "odd", 5, 128, 96, "float32"),
        _case("odd_17", "odd", 17, 100, 33, "float16"),
        _case("none", "odd", 0, 32, 64, "float32"),
    ),
    arguments=(
        Tensor("x", "tokens width"),
        Tensor("norm_weight", "width", mean=1, std=0.1),
        Tensor("norm_bias", "width", std=0.1),
        Tensor("a_weight", "hidden width", values=fan_in),
        Tensor("b_weight", "hidden width", values=fan_in),
        Tensor("out_weight", "width hidden", values=fan_in),
        Scalar("eps", default=1e-5),
    ),
    outputs=(Tensor("out", "tokens width"),),
    axes={"tokens": Axis.per_call(), "width": Axis.width(), "hidden": Axis.width()},
    flops="6 * tokens * width * hidden",
    tolerance={
        "float32": Tolerance(5e-5, 5e-5), "float16": Tolerance(8e-3, 8e-3), "bfloat16": Tolerance(6e-2, 6e-2),
    },
    baseline="torch",
)  # fmt: skip
