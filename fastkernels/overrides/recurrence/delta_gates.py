"""Decays and step sizes of gated delta nets (arXiv 2412.06464) and of Kimi's (arXiv 2510.26692), of their projections.

g = rate softplus(dt + bias), the logarithm of the decay, or low sigmoid(-rate (dt + bias)) with a bound low < 0

beta = sigmoid(b)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recurrence.kernels.problem import log_decay, unsupported
from fastkernels.overrides.recurrence.packed import check_shapes

T = torch.Tensor
BLOCK = 256  # numbers of a program


def _check(dt: T, b: T, rate: T, bias: T) -> None:
    if dt.dim() not in (2, 3) or b.dim() != 2:
        raise ValueError(
            f"delta_gates: dt {tuple(dt.shape)} and b {tuple(b.shape)} must be [T, H] or [T, H, K], and [T, H]"
        )
    heads = tuple(dt.shape[:2])
    check_shapes("delta_gates", b=(b, heads, "[T, H]"), rate=(rate, heads[1:], "[H]"),
                 bias=(bias, tuple(dt.shape[1:]), "[H] or [H, K], as dt"))  # fmt: skip


def reference(dt: T, b: T, rate: T, bias: T, logarithm: bool = False, low: float = 0.0) -> tuple[T, T]:
    """dt: [T, H] or [T, H, K]; b: [T, H]; rate: [H], or with `logarithm` the logarithm of its absolute value.

    bias: [H] or [H, K]; low: the bound of g, 0 for none. Computed in at least float32. Returns g in that dtype, and
    beta in b's dtype.
    """
    _check(dt, b, rate, bias)
    acc = torch.promote_types(dt.dtype, torch.float32)
    rates = -rate.to(acc).exp() if logarithm else rate.to(acc)
    rates, steps = rates.view(-1, *[1] * (dt.dim() - 2)), dt.to(acc) + bias.to(acc)
    g = low * (-rates * steps).sigmoid() if low else rates * F.softplus(steps)
    return g, b.to(acc).sigmoid().to(b.dtype)


@triton.jit(do_not_specialize=["COUNT", "LOW"])
def _delta_gates_kernel(
    dt_ptr, b_ptr, rate_ptr, bias_ptr, g_ptr, beta_ptr, COUNT, H, K, dt_t, b_t, LOW,
    LOGARITHM: tl.constexpr, BOUNDED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # The first programs have the numbers b, too: there are at least as many numbers dt.
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COUNT * H * K
    row, col = at // (H * K), at % (H * K)
    dt = tl.load(dt_ptr + row * dt_t + col, mask=inside, other=0.0).to(tl.float32)
    dt += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(rate_ptr + col // K, mask=inside, other=0.0).to(tl.float32)
    tl.store(g_ptr + at, log_decay(dt, rate, LOW, LOGARITHM, BOUNDED), mask=inside)
    inside = at < COUNT * H
    b = tl.load(b_ptr + at // H * b_t + at % H, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta_ptr + at, (1.0 / (1.0 + tl.exp(-b))).to(beta_ptr.dtype.element_ty), mask=inside)


def _supports_triton(dt: T, b: T, rate: T, bias: T, logarithm: bool = False, low: float = 0.0) -> str | None:
    if dt.dim() == 3 and dt.stride(1) != dt.shape[2] and dt.shape[1] > 1:
        return f"dt has stride {dt.stride(1)} between its heads, not {dt.shape[2]}"
    if not bias.is_contiguous() or not rate.is_contiguous():
        return "the rate or the bias is not contiguous"
    return unsupported(dt, b, others=(rate, bias))


def _triton(dt: T, b: T, rate: T, bias: T, logarithm: bool = False, low: float = 0.0) -> tuple[T, T]:
    _check(dt, b, rate, bias)
    g = torch.empty(dt.shape, dtype=torch.float32, device=dt.device)
    beta = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    if g.numel():
        tokens, heads = b.shape
        launch_kernel(
            _delta_gates_kernel, (cdiv(g.numel(), BLOCK),), dt, b, rate, bias, g, beta, tokens, heads,
            g.numel() // b.numel(), dt.stride(0), b.stride(0), low, LOGARITHM=logarithm, BOUNDED=low != 0.0,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return g, beta


def _reference(dt: T, b: T, rate: T, bias: T, logarithm: bool = False, low: float = 0.0) -> tuple[T, T]:
    g, beta = reference(dt, b, rate, bias, logarithm, low)
    return g.float(), beta.contiguous()


delta_gates = define(
    "delta_gates(Tensor dt, Tensor b, Tensor rate, Tensor bias, bool logarithm=False, float low=0.0)"
    " -> (Tensor, Tensor)",
    fake=lambda dt, b, *rest: (
        torch.empty(dt.shape, dtype=torch.float32, device=dt.device),
        torch.empty(b.shape, dtype=b.dtype, device=b.device),
    ),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def rates(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """-1 to -16, or their logarithms."""
    rate = 1 + 15 * call.rand(*shape)
    return (rate.log() if call["logarithm"] else -rate).to(dtype)


def _far(args: list[T]) -> None:
    args[0].mul_(30.0)  # steps of nearly 0, and of dt itself
    args[1].mul_(30.0)


def _model(name: str, keys: int, tokens: tuple[int, ...]) -> tuple[Case, ...]:
    dims = {"heads": 32, "keys": keys, "gates": "channel" if keys > 1 else "head"}
    return tuple(Case(f"{name}_{n}", {"tokens": n, **dims}, weight=1, tags=("model",)) for n in tokens)


def _odd(name: str, tokens: int, heads: int, keys: int, dtype: str, **more: Any) -> Case:
    dims = {
        "tokens": tokens,
        "heads": heads,
        "keys": keys,
        "gates": "channel" if keys > 1 else "head",
        **more,
    }
    return Case(name, dims, dtype, tags=("odd",))


_GATES = {"gates == 'channel'": "{}heads keys", "": "{}heads"}


def _by_gate(begin: str) -> dict[str, str]:
    return {when: axes.format(begin) for when, axes in _GATES.items()}


SPEC = OpSpec(
    name="delta_gates",
    level=1,
    reference=reference,
    op=delta_gates,
    arguments=(
        Tensor("dt", _by_gate("tokens "), mean=-1),
        Tensor("b", "tokens heads"),
        Tensor("rate", "heads", "float32", values=rates),
        Tensor("bias", _by_gate(""), "float32"),
        Scalar("logarithm", default=False),
        Scalar("low", default=0.0),
    ),
    outputs=(Tensor("g", _by_gate("tokens "), "float32"), Tensor("beta", "tokens heads")),
    axes={
        "gates": Axis("head", read=lambda a: "channel" if a.dt.dim() == 3 else "head"),
        "tokens": Axis.per_call(),
        "heads": Axis.count(),
        "keys": Axis.width(),
    },
    flops="8 * tokens * heads",
    cases=(
        *_model("qwen3_next", 1, (1, 8, 32, 256, 8192)),  # Qwen3-Next 80B
        *_model("kimi_linear", 128, (1, 8, 32, 256, 8192)),  # Kimi-Linear 48B
        _odd("one", 1, 1, 1, "float32"),
        _odd("odd_63", 63, 3, 1, "bfloat16", logarithm=True),
        _odd("channels_5", 5, 3, 20, "float32", logarithm=True),
        _odd("channels_7", 7, 2, 33, "bfloat16"),
        _odd("bounded_9", 9, 3, 20, "bfloat16", logarithm=True, low=-5.0),
        _odd("half", 40, 6, 1, "float16"),
        _odd("empty", 0, 4, 1, "bfloat16"),
    ),
    activations=("dt", "b"),
    extremes={"far": _far},
)  # fmt: skip
