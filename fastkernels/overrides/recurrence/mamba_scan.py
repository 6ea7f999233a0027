"""Selective scan of Mamba (arXiv 2312.00752): a diagonal recurrence with a state of N numbers for each channel.

S = exp(dt A) S + dt B x;  y = C S + D x;  out = y silu(z)      dt = softplus(dt + dt_bias)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, OpSpec, Tensor
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recurrence import cases
from fastkernels.overrides.recurrence.kernels.problem import WIDEST, sequence_at, softplus, unsupported
from fastkernels.overrides.recurrence.kernels.results import result_like
from fastkernels.overrides.recurrence.packed import (
    begin,
    check_shapes,
    check_slots,
    scan,
    store,
    wide,
    written,
)

T = torch.Tensor
BLOCK = 32  # channels of a program
RESIDENT = 8  # programs of a multiprocessor, from which on one warp has all channels of a program


def _check(x: T, dt: T, a: T, b: T, c: T, d: T | None, z: T | None, dt_bias: T | None, state: T) -> None:
    if x.dim() != 2 or a.dim() != 2:
        raise ValueError(f"mamba_scan: x {tuple(x.shape)} and a {tuple(a.shape)} must be [T, D] and [D, N]")
    (tokens, channels), n = x.shape, a.shape[1]
    each, group = ((tokens, channels), "[T, D]"), ((tokens, n), "[T, N]")
    check_shapes(
        "mamba_scan", dt=(dt, *each), a=(a, (channels, n), "[D, N]"), b=(b, *group), c=(c, *group), z=(z, *each),
        d=(d, (channels,), "[D]"), dt_bias=(dt_bias, (channels,), "[D]"),
        state=(state, (state.shape[0], channels, n), "[S, D, N]"),
    )  # fmt: skip


def reference(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, z: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None,
    slots: T, fresh: T | None,
) -> tuple[T, T]:  # fmt: skip
    """x, dt, z: [T, D]; a: [D, N]; b, c: [T, N]; d, dt_bias: [D]; state: [S, D, N].

    cu_seqlens: [B + 1]; slots, fresh: [B]. Computed in at least float32. Returns the outputs in x's dtype and the new
    state.
    """
    _check(x, dt, a, b, c, d, z, dt_bias, state)
    check_slots("mamba_scan", x, state, cu_seqlens, slots, fresh)
    acc = wide(x)
    inputs, keys, queries, decay, delta = (t.to(acc) for t in (x, b, c, a, dt))
    delta = F.softplus(delta if dt_bias is None else delta + dt_bias.to(acc))
    out = torch.zeros(x.shape, dtype=acc, device=x.device)

    def step(s: T, rows: T) -> tuple[T, T]:
        each = delta[rows]  # [B, D]
        s = s * (each[..., None] * decay).exp() + (each * inputs[rows])[..., None] * keys[rows][:, None]
        return s, (s * queries[rows][:, None]).sum(-1)

    last = scan(step, begin(state, slots, fresh, acc), cu_seqlens, out)
    out = out if d is None else out + d.to(acc) * inputs
    out = out if z is None else out * F.silu(z.to(acc))
    return out.to(x.dtype), written(state, slots, last)


@triton.jit
def _mamba_scan_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, state_ptr, cu_ptr, slots_ptr, fresh_ptr, out_ptr,
    x_t, dt_t, a_c, b_t, c_t, z_t, s_s, s_c, s_n,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    i = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    cols = tl.arange(0, BLOCK_N)
    real, kept = rows < C, cols < N
    inside = real[:, None] & kept[None, :]
    start, count, slot, known = sequence_at(i, cu_ptr, slots_ptr, fresh_ptr)
    a = tl.load(a_ptr + rows[:, None] * a_c + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    state_at = state_ptr + slot * s_s + rows[:, None] * s_c + cols[None, :] * s_n
    s = tl.load(state_at, mask=inside & known, other=0.0).to(tl.float32)
    if HAS_D:
        skip = tl.load(d_ptr + rows, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=real, other=0.0).to(tl.float32)
    for n in range(0, count):
        t = start + n
        x = tl.load(x_ptr + t * x_t + rows, mask=real, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + t * dt_t + rows, mask=real, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + t * b_t + cols, mask=kept, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * c_t + cols, mask=kept, other=0.0).to(tl.float32)
        if HAS_BIAS:
            dt += bias
        dt = softplus(dt)
        s = s * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
        y = tl.sum(s * c[None, :], axis=1)
        if HAS_D:
            y += skip * x
        if HAS_Z:
            z = tl.load(z_ptr + t * z_t + rows, mask=real, other=0.0).to(tl.float32)
            y *= z / (1.0 + tl.exp(-z))
        tl.store(out_ptr + t * C + rows, y.to(out_ptr.dtype.element_ty), mask=real)
    tl.store(state_at, s.to(state_ptr.dtype.element_ty), mask=inside & (slot > 0))


def _supports_triton(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, z: T | None, dt_bias: T | None, state: T, *_: Any
) -> str | None:
    if a.shape[1] > WIDEST:
        return f"{a.shape[1]} numbers of state are over {WIDEST}"
    return unsupported(x, dt, a, b, c, d, z, dt_bias, others=(state,))


def _triton(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, z: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None,
    slots: T, fresh: T | None,
) -> T:  # fmt: skip
    _check(x, dt, a, b, c, d, z, dt_bias, state)
    check_slots("mamba_scan", x, state, cu_seqlens, slots, fresh)
    (_, channels), states, batch = x.shape, a.shape[1], slots.shape[0]
    out = result_like(x)
    if batch * channels * states == 0:
        return out
    warps, many = 4, cdiv(channels, BLOCK) * batch >= RESIDENT * multiprocessors(x.device)
    if (
        cu_seqlens is None and states <= 32
    ):  # few numbers a thread are mostly addresses; prompts wait for each token
        warps = 1 if many else 2
    launch_kernel(
        _mamba_scan_kernel, (cdiv(channels, BLOCK), batch),
        x, dt, a, b, c, d, z, dt_bias, state, cu_seqlens, slots, fresh, out,
        x.stride(0), dt.stride(0), a.stride(0), b.stride(0), c.stride(0), 0 if z is None else z.stride(0),
        *state.stride(), HAS_D=d is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None,
        C=channels, N=states, BLOCK_C=BLOCK, BLOCK_N=next_power_of_2(states), num_warps=warps,
    )  # fmt: skip
    return out


def _reference(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, z: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None,
    slots: T, fresh: T | None,
) -> T:  # fmt: skip
    out, new = reference(x, dt, a, b, c, d, z, dt_bias, state, cu_seqlens, slots, fresh)
    store(state, slots, new)
    return out.contiguous()


mamba_scan = define(
    "mamba_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? dt_bias,"
    " Tensor(a!) state, Tensor? cu_seqlens, Tensor slots, Tensor? fresh) -> Tensor",
    fake=lambda x, *rest: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _rates(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """-1 to -N, as Mamba begins."""
    return -(1 + torch.arange(shape[1], device=call.device)).expand(shape).contiguous().to(dtype)


def _ones(args: list[T]) -> None:
    args[1].fill_(-20)  # steps of nearly 0: decays near 1


def _zeros(args: list[T]) -> None:
    args[1].fill_(10)  # decays near 0
    args[0].mul_(0.1)


_ALL = {"skip": True, "gate": True, "bias": True}  # as Mamba calls it

SPEC = OpSpec(
    name="mamba_scan",
    level=1,
    reference=reference,
    op=mamba_scan,
    arguments=(
        Tensor("x", "tokens channels"),
        Tensor("dt", "tokens channels", mean=-3),
        Tensor("a", "channels states", "float32", values=_rates),
        Tensor("b", "tokens states"),
        Tensor("c", "tokens states", std=0.5),
        Tensor("d", "channels", "float32", when="skip"),
        Tensor("z", "tokens channels", when="gate"),
        Tensor("dt_bias", "channels", "float32", when="bias"),
        cases.state("rows channels states", "channels * states"),
        *cases.TAIL,
    ),
    outputs=(Tensor("out", "tokens channels"),),
    axes={**cases.AXES, "channels": Axis.width(), "states": Axis.width()},
    constraints=cases.CONSTRAINTS,
    values=cases.values,
    flops="7 * tokens * channels * states",
    cases=(
        *cases.model_cases("mamba", channels=5120, states=16, **_ALL),  # Mamba 2.8B
        *cases.model_cases("jamba", channels=8192, states=16, **_ALL),  # Jamba 1.5 Mini
        cases.odd("one", {"seq_lens": (1,), "channels": 1, "states": 1}, "float32"),
        cases.odd("odd_63", {"seq_lens": (7, 2, 1), "channels": 63, "states": 5, "new": 2}),
        cases.odd("all", {"seq_lens": (5, 5, 3), "channels": 40, "states": 16, "new": 1, **_ALL}, "float32"),
        cases.odd("half", {"seq_lens": (9, 2), "channels": 33, "states": 8, "gate": True}, "float16"),
        cases.odd("skip", {"seq_lens": (6,), "channels": 65, "states": 20, "skip": True, "bias": True}, "float32"),
        cases.odd("decode_5", {**cases.decode(5), "channels": 100, "states": 16, "padding": 2, **_ALL}),
        cases.odd("begins_3", {"seq_lens": (1,) * 3, "channels": 40, "states": 16, "decode": True, "new": 1, **_ALL}),
        cases.odd("half_state", {"seq_lens": (4, 1), "channels": 64, "states": 16, "state_dtype": "float16", **_ALL}),
        *cases.bf16_states(channels=40, states=16, **_ALL),
        cases.odd("empty", {"seq_lens": (0, 3), "channels": 8, "states": 16, "new": 1, "bias": True}),
        cases.odd("wide_states", {"seq_lens": (2,), "channels": 8, "states": 64, "bias": True}, "float32"),
    ),
    activations=("x",),
    extremes={"no_decay": _ones, "full_decay": _zeros},
    batch_invariant=True,  # a program has channels of one sequence
)  # fmt: skip
