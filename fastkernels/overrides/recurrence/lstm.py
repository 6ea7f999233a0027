"""One layer of an LSTM in one direction, after its linear layer of inputs: torch.nn.LSTM's equations.

i, f, g, o = gates + weight h;  c = sigmoid(f) c + sigmoid(i) tanh(g);  h = sigmoid(o) tanh(c)
"""

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
BLOCK = 8  # channels of a program


def reference(gates: T, weight: T, h: T, c: T) -> tuple[T, T, T]:
    """gates: [B, T, 4 H], inputs times weight_ih plus both biases; weight: weight_hh, [4 H, H]; h, c: [B, H].

    Computed in at least float32. Returns the outputs [B, T, H] in the dtype of gates, the new h and the new c.
    """
    wide = torch.promote_types(gates.dtype, torch.float32)
    hidden, cell, w = h.to(wide), c.to(wide), weight.to(wide)
    out = gates.new_empty(*gates.shape[:2], h.shape[-1], dtype=wide)
    for t in range(gates.shape[1]):
        i, f, g, o = (gates[:, t].to(wide) + hidden @ w.t()).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        out[:, t] = hidden
    return out.to(gates.dtype), hidden.to(h.dtype), cell.to(c.dtype)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def _lstm_kernel(
    gates_ptr, weight_ptr, h_ptr, new_ptr, c_ptr, out_ptr, H, gates_b, weight_g, h_b, new_b, c_b, out_b,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = rows < H
    at = gates_ptr + batch * gates_b + rows
    i = tl.load(at, mask=real, other=0.0).to(tl.float32)
    f = tl.load(at + H, mask=real, other=0.0).to(tl.float32)
    g = tl.load(at + 2 * H, mask=real, other=0.0).to(tl.float32)
    o = tl.load(at + 3 * H, mask=real, other=0.0).to(tl.float32)
    for start in range(0, H, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        inside = real[:, None] & (cols < H)[None, :]
        old = tl.load(h_ptr + batch * h_b + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
        w_at = weight_ptr + rows[:, None] * weight_g + cols[None, :]
        i += tl.sum(tl.load(w_at, mask=inside, other=0.0).to(tl.float32) * old, axis=1)
        f += tl.sum(tl.load(w_at + H * weight_g, mask=inside, other=0.0).to(tl.float32) * old, axis=1)
        g += tl.sum(tl.load(w_at + 2 * H * weight_g, mask=inside, other=0.0).to(tl.float32) * old, axis=1)
        o += tl.sum(tl.load(w_at + 3 * H * weight_g, mask=inside, other=0.0).to(tl.float32) * old, axis=1)
    c_at = c_ptr + batch * c_b + rows
    c = _sigmoid(f) * tl.load(c_at, mask=real, other=0.0).to(tl.float32) + _sigmoid(i) * _tanh(g)
    h = _sigmoid(o) * _tanh(c)
    tl.store(c_at, c.to(c_ptr.dtype.element_ty), mask=real)
    tl.store(new_ptr + batch * new_b + rows, h.to(new_ptr.dtype.element_ty), mask=real)
    tl.store(out_ptr + batch * out_b + rows, h.to(out_ptr.dtype.element_ty), mask=real)


def _supports_triton(gates: T, weight: T, h: T, c: T) -> str | None:
    for name, x in {"gates": gates, "weight": weight, "h": h, "c": c}.items():
        if x.dtype not in FLOATS:
            return f"{name} is {x.dtype}, not float16, bfloat16 or float32"
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            return f"{name} has stride {x.stride(-1)} in its last dimension, not 1"
    return None


def _triton(gates: T, weight: T, h: T, c: T) -> T:
    """A launch for each token; the other half of a pair of states takes what a step writes."""
    batch, tokens, hidden = *gates.shape[:2], h.shape[-1]
    out = torch.empty(batch, tokens, hidden, dtype=gates.dtype, device=gates.device)
    if out.numel() == 0:
        return out
    states = torch.empty(2, batch, hidden, dtype=torch.float32, device=h.device)
    states[1] = h
    for t in range(tokens):
        old, new = states[1 - t % 2], states[t % 2]
        launch_kernel(
            _lstm_kernel, (cdiv(hidden, BLOCK), batch),
            gates[:, t], weight, old, new, c, out[:, t], hidden,
            gates.stride(0), weight.stride(0), hidden, hidden, c.stride(0), out.stride(0),
            BLOCK_H=BLOCK, BLOCK_K=min(256, next_power_of_2(hidden)), num_warps=4,
        )  # fmt: skip
    h.copy_(states[1 - tokens % 2])
    return out


def _reference(gates: T, weight: T, h: T, c: T) -> T:
    out, new_h, new_c = reference(gates, weight, h, c)
    h.copy_(new_h)
    c.copy_(new_c)
    return out.contiguous()


lstm = define(
    "lstm(Tensor gates, Tensor weight, Tensor(a!) h, Tensor(b!) c) -> Tensor",
    fake=lambda gates, weight, h, c: gates.new_empty(*gates.shape[:2], h.shape[-1]),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, batch: int, tokens: int, hidden: int, dtype: str = "float32", tag: str = "odd", weight: int = 1
) -> Case:
    return Case(name, {"batch": batch, "tokens": tokens, "hidden": hidden}, dtype, weight=weight, tags=(tag,))


SPEC = OpSpec(
    name="lstm",
    level=1,
    reference=reference,
    op=lstm,
    arguments=(
        Tensor("gates", "batch tokens 4*hidden"),
        Tensor("weight", "4*hidden hidden", std=0.05),
        Tensor("h", "batch hidden", "float32", mutated=True),
        Tensor("c", "batch hidden", "float32", mutated=True),
    ),
    outputs=(Tensor("out", "batch tokens hidden"),),
    axes={"batch": Axis.per_call(), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="8 * batch * tokens * hidden * hidden",
    cases=(  # Parakeet RNN-T: a token of 640 channels; EnCodec 24 kHz: a second in 512 channels
        _case("parakeet_1", 1, 1, 640, "bfloat16", "model", 64),
        _case("parakeet_16", 16, 1, 640, "bfloat16", "model", 64),
        _case("encodec_75", 1, 75, 512, "float32", "model"),
        _case("one", 1, 1, 1),
        _case("odd_63", 2, 7, 63),
        _case("even", 3, 4, 40, "bfloat16"),
        _case("half", 5, 1, 100, "float16"),
        _case("wide", 1, 2, 260, "float16"),
        _case("many", 7, 1, 32, "bfloat16"),
        _case("long", 1, 20, 16),
    ),
    activations=("gates",),
)
