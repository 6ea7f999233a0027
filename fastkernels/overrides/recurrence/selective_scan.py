"""Selective scan of Mamba (arXiv 2312.00752): a diagonal recurrence with a state of N numbers for each channel.

S = exp(dt A) S + dt B u;  y = C S + D u;  out = y silu(z)      dt = delta + delta_bias, optionally through softplus
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

WIDEST = 256  # numbers of state of a channel
BLOCK = 32  # channels of a program
T = torch.Tensor


def _check(u: T) -> None:
    if u.dim() != 3:
        raise ValueError(f"selective_scan: u {tuple(u.shape)} must be [batch, T, channels]")


def reference(
    u: T, delta: T, A: T, B: T, C: T, state: T, D: T | None = None, z: T | None = None, delta_bias: T | None = None,
    delta_softplus: bool = False,
) -> tuple[T, T]:  # fmt: skip
    """u, delta, z: [batch, T, channels]; A: [channels, N]; B, C: [batch, T, N]; state: [batch, channels, N].

    D, delta_bias: [channels]. Computed in at least float32. Returns the outputs in u's dtype and the new state.
    """
    _check(u)
    wide = torch.promote_types(u.dtype, torch.float32)
    x, dt, keys, queries, s = (v.to(wide) for v in (u, delta, B, C, state))
    if delta_bias is not None:
        dt = dt + delta_bias.to(wide)
    if delta_softplus:
        dt = F.softplus(dt)
    out = torch.empty_like(x)
    for t in range(u.shape[1]):
        s = s * (dt[:, t, :, None] * A.to(wide)).exp() + (dt * x)[:, t, :, None] * keys[:, t, None]
        out[:, t] = (s * queries[:, t, None]).sum(-1)
    if D is not None:
        out = out + D.to(wide) * x
    if z is not None:
        out = out * F.silu(z.to(wide))
    return out.to(u.dtype), s.to(state.dtype)


@triton.jit(do_not_specialize=["n_tokens"])
def _selective_scan_kernel(
    u_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, state_ptr, d_ptr, z_ptr, bias_ptr, out_ptr, n_tokens, channels, N,
    u_b, u_t, u_c, delta_b, delta_t, delta_c, z_b, z_t, z_c, b_b, b_t, b_n, c_b, c_t, c_n, a_c, a_n, s_b, s_c, s_n,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    cols = tl.arange(0, BLOCK_N)
    real, kept = rows < channels, cols < N
    inside = real[:, None] & kept[None, :]
    a = tl.load(a_ptr + rows[:, None] * a_c + cols[None, :] * a_n, mask=inside, other=0.0).to(tl.float32)
    state_at = state_ptr + batch * s_b + rows[:, None] * s_c + cols[None, :] * s_n
    s = tl.load(state_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_D:
        skip = tl.load(d_ptr + rows, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=real, other=0.0).to(tl.float32)
    u_at = u_ptr + batch * u_b + rows * u_c
    delta_at = delta_ptr + batch * delta_b + rows * delta_c
    if HAS_Z:
        z_at = z_ptr + batch * z_b + rows * z_c
    b_at = b_ptr + batch * b_b + cols * b_n
    c_at = c_ptr + batch * c_b + cols * c_n
    out_at = out_ptr + batch * n_tokens * channels + rows
    for _ in range(n_tokens):
        x = tl.load(u_at, mask=real, other=0.0).to(tl.float32)
        dt = tl.load(delta_at, mask=real, other=0.0).to(tl.float32)
        key = tl.load(b_at, mask=kept, other=0.0).to(tl.float32)
        query = tl.load(c_at, mask=kept, other=0.0).to(tl.float32)
        if HAS_BIAS:
            dt += bias
        if SOFTPLUS:
            dt = tl.maximum(dt, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(dt)))
        s = s * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * key[None, :]
        y = tl.sum(s * query[None, :], axis=1)
        if HAS_D:
            y += skip * x
        if HAS_Z:
            gate = tl.load(z_at, mask=real, other=0.0).to(tl.float32)
            y *= gate / (1.0 + tl.exp(-gate))
            z_at += z_t
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=real)
        u_at += u_t
        delta_at += delta_t
        b_at += b_t
        c_at += c_t
        out_at += channels
    tl.store(state_at, s.to(state_ptr.dtype.element_ty), mask=inside)


def _supports_triton(*given: Any) -> str | None:
    for x in given:
        if isinstance(x, T) and x.dtype not in FLOATS:
            return f"a tensor is {x.dtype}, not float16, bfloat16 or float32"
    for x in (*given[6:7], *given[8:9]):
        if x is not None and not x.is_contiguous():
            return "D or delta_bias is not contiguous"
    return f"{given[2].shape[1]} numbers of state are over {WIDEST}" if given[2].shape[1] > WIDEST else None


def _triton(
    u: T, delta: T, A: T, B: T, C: T, state: T, D: T | None = None, z: T | None = None, delta_bias: T | None = None,
    delta_softplus: bool = False,
) -> T:  # fmt: skip
    _check(u)
    batch, tokens, channels = u.shape
    out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    if out.numel() == 0:
        return out
    launch_kernel(
        _selective_scan_kernel, (cdiv(channels, BLOCK), batch),
        u, delta, A, B, C, state, D, z, delta_bias, out, tokens, channels, A.shape[1],
        *u.stride(), *delta.stride(), *(u if z is None else z).stride(), *B.stride(), *C.stride(), *A.stride(),
        *state.stride(), HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=delta_bias is not None,
        SOFTPLUS=delta_softplus, BLOCK_C=BLOCK, BLOCK_N=next_power_of_2(A.shape[1]), num_warps=4,
    )  # fmt: skip
    return out


def _reference(u: T, delta: T, A: T, B: T, C: T, state: T, *more: Any) -> T:
    out, new = reference(u, delta, A, B, C, state, *more)
    state.copy_(new)
    return out.contiguous()


selective_scan = define(
    "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor(a!) state, Tensor? D=None,"
    " Tensor? z=None, Tensor? delta_bias=None, bool delta_softplus=False) -> Tensor",
    fake=lambda u, *rest: torch.empty(u.shape, dtype=u.dtype, device=u.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _decay(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    return (-call.rand(*shape)).to(dtype)


def _steps(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    return call.rand(*shape).to(dtype)


def _case(name: str, sizes: tuple[int, ...], dtype: str = "bfloat16", weight: int = 1, **more: bool) -> Case:
    axes = dict(zip(("batch", "tokens", "channels", "states"), sizes, strict=True))
    return Case(name, axes | more, dtype, weight=weight, tags=("model" if "mamba" in name else "odd",))


_ALL: dict[str, Any] = {"skip": True, "gate": True, "bias": True, "delta_softplus": True}  # as Mamba calls it

SPEC = OpSpec(
    name="selective_scan",
    level=1,
    reference=reference,
    op=selective_scan,
    arguments=(
        Tensor("u", "batch tokens channels"),
        Tensor("delta", "batch tokens channels", values=_steps),
        Tensor("A", "channels states", "float32", values=_decay),
        Tensor("B", "batch tokens states"),
        Tensor("C", "batch tokens states"),
        Tensor("state", "batch channels states", "float32", mutated=True),
        Tensor("D", "channels", when="skip"),
        Tensor("z", "batch tokens channels", when="gate"),
        Tensor("delta_bias", "channels", when="bias", values=_steps),
        Scalar("delta_softplus", default=False),
    ),
    outputs=(Tensor("out", "batch tokens channels"),),
    axes={
        "batch": Axis.per_call(),
        "tokens": Axis.per_call(),
        "channels": Axis.width(),
        "states": Axis.width(),
    },
    flops="7 * batch * tokens * channels * states",
    cases=(  # Mamba 2.8B
        _case("mamba_32", (32, 1, 5120, 16), weight=64, **_ALL),
        _case("mamba_512", (1, 512, 5120, 16), **_ALL),
        _case("one", (1, 1, 1, 1), "float32"),
        _case("odd_63", (2, 7, 63, 5)),
        _case("all", (3, 5, 40, 16), "float32", **_ALL),
        _case("half", (2, 9, 33, 8), "float16", gate=True, delta_softplus=True),
        _case("skip", (1, 6, 65, 20), "float32", skip=True, bias=True),
        _case("many", (5, 1, 100, 16), **_ALL),
        _case("widest", (1, 2, 8, 256), "float32", bias=True),
    ),
    activations=("u",),
    batch_invariant=True,  # a program has channels of one sequence
)
