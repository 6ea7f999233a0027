"""Causal depthwise convolution over packed sequences, with its last inputs as state (Mamba, arXiv 2312.00752).

y[t, c] = act(bias[c] + sum_j weight[c, j] x[t - W + 1 + j, c])
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Expr, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recurrence import cases
from fastkernels.overrides.recurrence.kernels.chunk_parts import sequence_of
from fastkernels.overrides.recurrence.kernels.problem import sequence_at, slot_at, unsupported
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
ACTIVATIONS = ("silu", "none")
DECODED = 128  # channels of a program with one token: 1.44 us for Mamba-2, 1.74 with 256 (H200)
STEPS_UP_TO = 4  # tokens of a sequence, in the mean, that run token by token


def _check(x: T, weight: T, bias: T | None, state: T, activation: str) -> None:
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(
            f"causal_conv1d: x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [T, C] and [C, W]"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"causal_conv1d: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    (_, c), w = x.shape, weight.shape[1]
    check_shapes(
        "causal_conv1d", weight=(weight, (c, w), "[C, W]"), bias=(bias, (c,), "[C]"),
        state=(state, (state.shape[0], c, w - 1), "[S, C, W - 1]"),
    )  # fmt: skip


def reference(
    x: T,
    weight: T,
    bias: T | None,
    state: T,
    cu_seqlens: T | None,
    slots: T,
    fresh: T | None,
    activation: str = "silu",
) -> tuple[T, T]:
    """x: [T, C]; weight: [C, W]; bias: [C]; state: [S, C, W - 1], the inputs before the first token, the newest last.

    cu_seqlens: [B + 1]; slots, fresh: [B]. Computed in at least float32. Returns the outputs in x's dtype and the new
    state.
    """
    _check(x, weight, bias, state, activation)
    check_slots("causal_conv1d", x, state, cu_seqlens, slots, fresh)
    acc = wide(x)
    inputs, kernel, out = x.to(acc), weight.to(acc), torch.zeros(x.shape, dtype=acc, device=x.device)

    def step(window: T, rows: T) -> tuple[T, T]:
        window = torch.cat([window, inputs[rows][..., None]], -1)  # [B, C, W]
        return window[..., 1:], (window * kernel).sum(-1)

    last = scan(step, begin(state, slots, fresh, acc), cu_seqlens, out)
    out = out if bias is None else out + bias.to(acc)
    return (F.silu(out) if activation == "silu" else out).to(x.dtype), written(state, slots, last)


@triton.jit
def _steps_kernel(
    x_ptr, w_ptr, bias_ptr, state_ptr, cu_ptr, slots_ptr, fresh_ptr, out_ptr, C, x_t, w_c, s_s, s_c, s_w,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A program has some channels of a sequence, token by token. Inputs move through its state, which is in caches.
    follow(OVERLAP)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = cols < C
    b = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        b += tl.load(bias_ptr + cols, mask=channel, other=0.0).to(tl.float32)
    start, count, slot, known = sequence_at(tl.program_id(0), cu_ptr, slots_ptr, fresh_ptr)
    end = start + count
    state_at = state_ptr + slot * s_s + cols * s_c
    for t in range(start, end):
        y = b
        for j in tl.static_range(W):
            w = tl.load(w_ptr + cols * w_c + j, mask=channel, other=0.0).to(tl.float32)
            at = t + (j - W + 1)
            if j == W - 1:
                x = tl.load(x_ptr + at * x_t + cols, mask=channel, other=0.0).to(tl.float32)
            else:
                x = tl.load(x_ptr + at * x_t + cols, mask=channel & (at >= start), other=0.0).to(tl.float32)
                back = state_at + (at - start + (W - 1)) * s_w
                x += tl.load(back, mask=channel & (at < start) & known, other=0.0).to(tl.float32)
            y += x * w
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(out_ptr + t * C + cols, y.to(out_ptr.dtype.element_ty), mask=channel)
    _keep(x_ptr, state_at, x_t, s_w, cols, channel, start, end, slot, known, W)


@triton.jit
def _decode_kernel(
    x_ptr, w_ptr, bias_ptr, state_ptr, slots_ptr, fresh_ptr, out_ptr, C, x_t, w_c, s_s, s_c, s_w,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A program has some channels of a sequence with one token. An input is read once: for its product, and as the next
    # place of the state.
    follow(OVERLAP)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = cols < C
    i = tl.program_id(0)
    slot, known = slot_at(i, slots_ptr, fresh_ptr)
    x = tl.load(x_ptr + i.to(tl.int64) * x_t + cols, mask=channel, other=0.0)
    state_at = state_ptr + slot * s_s + cols * s_c
    y = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=channel, other=0.0).to(tl.float32)
    for j in tl.static_range(W):
        w = tl.load(w_ptr + cols * w_c + j, mask=channel, other=0.0).to(tl.float32)
        if j == W - 1:
            old = x.to(tl.float32)
        else:
            old = tl.load(state_at + j * s_w, mask=channel & known, other=0.0).to(tl.float32)
        y += old * w
        if j > 0:
            kept = old.to(state_ptr.dtype.element_ty)
            tl.store(state_at + (j - 1) * s_w, kept, mask=channel & (slot > 0))
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + i.to(tl.int64) * C + cols, y.to(out_ptr.dtype.element_ty), mask=channel)


@triton.jit
def _keep(x_ptr, state_at, x_t, s_w, cols, channel, start, end, slot, known, W: tl.constexpr):
    # The last W - 1 inputs of a sequence become its state; all threads have read before any writes.
    tl.debug_barrier()
    for j in tl.static_range(W - 1):
        past = end + (j - W + 1)
        last = tl.load(x_ptr + past * x_t + cols, mask=channel & (past >= start), other=0.0).to(tl.float32)
        shifted = state_at + (past - start + (W - 1)) * s_w
        last += tl.load(shifted, mask=channel & (past < start) & known, other=0.0).to(tl.float32)
        tl.store(state_at + j * s_w, last.to(state_at.dtype.element_ty), mask=channel & (slot > 0))


@triton.jit(do_not_specialize=["B", "STEPS"])
def _tiles_kernel(
    x_ptr, w_ptr, bias_ptr, state_ptr, cu_ptr, slots_ptr, fresh_ptr, out_ptr, B, STEPS, C, x_t, w_c, s_s, s_c, s_w,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # A program has SIZE tokens of a sequence, and some channels.
    follow(OVERLAP)
    chunk = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = cols < C
    i = sequence_of(cu_ptr, chunk, B, STEPS, SIZE)
    start = tl.load(cu_ptr + i).to(tl.int64)
    end = tl.load(cu_ptr + i + 1).to(tl.int64)
    n = chunk - start // SIZE - i
    first = start + n * SIZE
    if (first >= end) & (n > 0):
        return
    slot, known = slot_at(i, slots_ptr, fresh_ptr)
    state_at = state_ptr + slot * s_s + cols * s_c
    row = first + tl.arange(0, SIZE)
    y = tl.zeros([SIZE, BLOCK], tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=channel, other=0.0).to(tl.float32)[None, :]
    if n == 0:  # its taps before the sequence; the order of the additions is the other kernel's
        for j in tl.static_range(W - 1):
            w = tl.load(w_ptr + cols * w_c + j, mask=channel, other=0.0).to(tl.float32)
            at = row + (j - W + 1)
            old = ((at < start) & (row < end) & known)[:, None] & channel[None, :]
            back = (at - start + (W - 1))[:, None] * s_w
            y += tl.load(state_at[None, :] + back, mask=old, other=0.0).to(tl.float32) * w[None, :]
    for j in tl.static_range(W):
        w = tl.load(w_ptr + cols * w_c + j, mask=channel, other=0.0).to(tl.float32)
        at = row + (j - W + 1)
        new = ((at >= start) & (row < end))[:, None] & channel[None, :]
        x = tl.load(x_ptr + at[:, None] * x_t + cols[None, :], mask=new, other=0.0).to(tl.float32)
        y += x * w[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + row[:, None] * C + cols[None, :], y.to(out_ptr.dtype.element_ty),
             mask=(row < end)[:, None] & channel[None, :])  # fmt: skip
    if n == 0:  # one program of a sequence has its state
        _keep(x_ptr, state_at, x_t, s_w, cols, channel, start, end, slot, known, W)


def _supports_triton(
    x: T,
    weight: T,
    bias: T | None,
    state: T,
    cu_seqlens: T | None,
    slots: T,
    fresh: T | None,
    activation: str = "silu",
) -> str | None:
    if weight.shape[-1] > 16:
        return f"{weight.shape[-1]} weights of a channel are over 16"
    return unsupported(x, weight, bias, others=(state,))


def _triton(
    x: T,
    weight: T,
    bias: T | None,
    state: T,
    cu_seqlens: T | None,
    slots: T,
    fresh: T | None,
    activation: str = "silu",
) -> T:
    _check(x, weight, bias, state, activation)
    check_slots("causal_conv1d", x, state, cu_seqlens, slots, fresh)
    (tokens, channels), width, batch = x.shape, weight.shape[1], slots.shape[0]
    out = result_like(x)
    if batch * channels == 0:
        return out
    shared = {"W": width, "HAS_BIAS": bias is not None, "SILU": activation == "silu"}
    if cu_seqlens is None:
        block = min(DECODED, next_power_of_2(channels))
        launch_kernel(
            _decode_kernel, (batch, cdiv(channels, block)), x, weight, bias, state, slots, fresh, out, channels,
            x.stride(0), weight.stride(0), *state.stride(), BLOCK=block, num_warps=2, **shared,
        )  # fmt: skip
        return out
    if tokens <= STEPS_UP_TO * batch:
        block = min(512, next_power_of_2(channels))
        launch_kernel(
            _steps_kernel, (batch, cdiv(channels, block)), x, weight, bias, state, cu_seqlens, slots, fresh, out,
            channels, x.stride(0), weight.stride(0), *state.stride(), BLOCK=block, num_warps=4, **shared,
        )  # fmt: skip
        return out
    size = 64 if tokens >= 64 * batch else 16
    block = min(128, next_power_of_2(channels))
    launch_kernel(
        _tiles_kernel, (tokens // size + batch, cdiv(channels, block)),
        x, weight, bias, state, cu_seqlens, slots, fresh, out, batch, batch.bit_length(), channels,
        x.stride(0), weight.stride(0), *state.stride(), SIZE=size, BLOCK=block, num_warps=4, **shared,
    )  # fmt: skip
    return out


def _reference(
    x: T,
    weight: T,
    bias: T | None,
    state: T,
    cu_seqlens: T | None,
    slots: T,
    fresh: T | None,
    activation: str = "silu",
) -> T:
    out, new = reference(x, weight, bias, state, cu_seqlens, slots, fresh, activation)
    store(state, slots, new)
    return out.contiguous()


causal_conv1d = define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor? cu_seqlens, Tensor slots,"
    " Tensor? fresh, str activation='silu') -> Tensor",
    fake=lambda x, *rest: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)

SPEC = OpSpec(
    name="causal_conv1d",
    level=1,
    reference=reference,
    op=causal_conv1d,
    arguments=(
        Tensor("x", "tokens channels"),
        Tensor("weight", "channels width", values=fan_in),
        Tensor("bias", "channels", when="bias", std=0.3),
        cases.state("rows channels width-1", "channels * (width - 1)", values=cases.keys_inside),
        *cases.TAIL,
        Scalar("activation", default="silu"),
    ),
    outputs=(Tensor("out", "tokens channels"),),
    axes={
        **cases.AXES,
        "state_dtype": Axis.dtype(Expr("dtype")),
        "channels": Axis.width(),
        "width": Axis.option(4),
    },
    constraints=cases.CONSTRAINTS,
    values=cases.values,
    flops="tokens * channels * (2 * width + 4)",
    cases=(
        *cases.model_cases("mamba2", channels=5376, bias=True),  # Mamba-2 2.7B
        *cases.model_cases("qwen3_next", channels=8192),  # Qwen3-Next 80B
        cases.odd("one", {"seq_lens": (1,), "channels": 1}, "float32"),
        cases.odd("odd_63", {"seq_lens": (7, 1, 30, 2), "channels": 63, "new": 2, "bias": True}),
        cases.odd("decode_5", {**cases.decode(5), "channels": 100, "padding": 2}),
        cases.odd("begins_3", {"seq_lens": (1,) * 3, "channels": 40, "decode": True, "new": 1, "bias": True}),
        cases.odd("plain", {"seq_lens": (3, 9), "channels": 129, "activation": "none"}, "float32"),
        cases.odd("width_2", {"seq_lens": (5, 1), "channels": 33, "width": 2, "new": 1, "bias": True}, "float16"),
        cases.odd("width_7", {"seq_lens": (4, 70), "channels": 20, "width": 7, "new": 1}),
        cases.odd("empty", {"seq_lens": (0, 3, 0), "channels": 48, "new": 1, "rows": 9}),
        cases.odd("long", {"seq_lens": (150, 65), "channels": 40, "new": 2, "bias": True}, "float16"),
    ),
    activations=("x",),
    batch_invariant=True,  # an output is computed alike whatever is next to it
)  # fmt: skip
