"""Gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464): a token corrects the state under its key.

S = exp(g) S;  S += k (beta (v - S^T k))^T;  o = scale S^T q

With `rate` and `bias`, g and beta are the inputs of `delta_gates`: a decode computes them itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, OpSpec, Scalar, Tensor
from fastkernels.overrides.recurrence import cases
from fastkernels.overrides.recurrence.delta_gates import delta_gates, rates
from fastkernels.overrides.recurrence.delta_gates import reference as gates_reference
from fastkernels.overrides.recurrence.kernels.chunks import in_chunks, solve
from fastkernels.overrides.recurrence.kernels.problem import DELTA, Problem, unsupported
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


def check(
    op: str, q: T, k: T, v: T, g: T, beta: T, state: T, channels: bool, rate: T | None, bias: T | None
) -> None:
    """Raise ValueError for shapes that contradict each other; `channels`: g has one decay for each channel of a key."""
    if (rate is None) != (bias is None):
        raise ValueError(
            f"{op}: rate and bias must be given together, got {'bias' if rate is None else 'rate'} alone"
        )
    if q.dim() != 3 or v.dim() != 3 or v.shape[1] % max(q.shape[1], 1):
        raise ValueError(
            f"{op}: q {tuple(q.shape)} and v {tuple(v.shape)} must be [T, Hk, K] and [T, Hv, V], where Hk divides Hv"
        )
    tokens, heads, size = v.shape
    keys = q.shape[2]
    gates = ((tokens, heads, keys), "[T, Hv, K]") if channels else ((tokens, heads), "[T, Hv]")
    check_shapes(
        op, q=(q, (tokens, *q.shape[1:]), "[T, Hk, K]"), k=(k, tuple(q.shape), "[T, Hk, K]"), g=(g, *gates),
        beta=(beta, (tokens, heads), "[T, Hv]"), state=(state, (state.shape[0], heads, keys, size), "[S, Hv, K, V]"),
        rate=(rate, (heads,), "[Hv]"), bias=(bias, gates[0][1:], "[Hv], or [Hv, K] with a decay for each channel"),
    )  # fmt: skip


def delta_rule(
    q: T,
    k: T,
    v: T,
    g: T,
    beta: T,
    state: T,
    cu_seqlens: T | None,
    slots: T,
    fresh: T | None,
    scale: float,
    normalize: bool,
) -> tuple[T, T]:
    """The reference of gated_delta_rule, g [T, Hv], and of kda, g [T, Hv, K]."""
    acc, group = wide(v), v.shape[1] // q.shape[1]
    queries, keys, values, decay, step_size = (t.to(acc) for t in (q, k, v, g, beta))
    if normalize:
        queries, keys = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (queries, keys))
    queries, keys = (t.repeat_interleave(group, 1) for t in (queries, keys))
    decay = decay if g.dim() == 3 else decay[..., None]  # [T, Hv, K or 1]
    out = torch.zeros(v.shape, dtype=acc, device=v.device)

    def step(s: T, rows: T) -> tuple[T, T]:
        key = keys[rows][..., None]
        s = s * decay[rows].exp()[..., None]
        new = step_size[rows][..., None] * (values[rows] - (s * key).sum(-2))
        s = s + key * new[..., None, :]
        return s, scale * (s * queries[rows][..., None]).sum(-2)

    last = scan(step, begin(state, slots, fresh, acc), cu_seqlens, out)
    return out.to(v.dtype), written(state, slots, last)


def reference(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, rate: T | None = None, bias: T | None = None, logarithm: bool = False, low: float = 0.0,
) -> tuple[T, T]:  # fmt: skip
    """q, k: [T, Hk, K]; v: [T, Hv, V]; g, beta: [T, Hv]; state: [S, Hv, K, V]; cu_seqlens: [B + 1]; slots, fresh: [B].

    normalize: divide queries and keys by their length. rate, bias: [Hv]; these, logarithm and low as in delta_gates.
    Computed in at least float32. Returns the outputs [T, Hv, V] in v's dtype and the new state.
    """
    check("gated_delta_rule", q, k, v, g, beta, state, False, rate, bias)
    check_slots("gated_delta_rule", v, state, cu_seqlens, slots, fresh)
    if rate is not None and bias is not None:
        g, beta = gates_reference(g, beta, rate, bias, logarithm, low)
    return delta_rule(q, k, v, g, beta, state, cu_seqlens, slots, fresh, scale, normalize)


def supports(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, rate: T | None = None, bias: T | None = None, *_: Any,
) -> str | None:  # fmt: skip
    """Why the Triton kernels do not take these arguments, of this op and of kda; None if they do."""
    if rate is not None and bias is not None and not (rate.is_contiguous() and bias.is_contiguous()):
        return "the rate or the bias is not contiguous"
    rows = (q, k, v, g) if g.dim() == 3 else (q, k, v)
    return unsupported(*rows, others=(g, beta, state, rate, bias), keys=q.shape[-1])


def solved(p: Problem) -> T:
    """The outputs of a problem with `rate`, or without. Chunks read gates that are computed before."""
    if p.rate is not None and p.bias is not None and p.beta is not None and in_chunks(p):
        g, beta = delta_gates(p.g, p.beta, p.rate, p.bias, p.logarithm, p.low)
        p = replace(p, g=g, beta=beta, rate=None, bias=None)
    return solve(p)


def _supports_triton(*args: Any) -> str | None:
    return supports(*args)


def _triton(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, rate: T | None = None, bias: T | None = None, logarithm: bool = False, low: float = 0.0,
) -> T:  # fmt: skip
    check("gated_delta_rule", q, k, v, g, beta, state, False, rate, bias)
    check_slots("gated_delta_rule", v, state, cu_seqlens, slots, fresh)
    return solved(
        Problem(
            q, k, v, g, state, cu_seqlens, slots, fresh, DELTA, scale, normalize, beta, rate=rate, bias=bias,
            low=low, logarithm=logarithm,
        )
    )  # fmt: skip


def _reference(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, rate: T | None = None, bias: T | None = None, logarithm: bool = False, low: float = 0.0,
) -> T:  # fmt: skip
    given = scale, normalize, rate, bias, logarithm, low
    out, new = reference(q, k, v, g, beta, state, cu_seqlens, slots, fresh, *given)
    store(state, slots, new)
    return out.contiguous()


gated_delta_rule = define(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor? cu_seqlens,"
    " Tensor slots, Tensor? fresh, float scale=1.0, bool normalize=False, Tensor? rate=None, Tensor? bias=None,"
    " bool logarithm=False, float low=0.0) -> Tensor",
    fake=lambda q, k, v, *rest: torch.empty(v.shape, dtype=v.dtype, device=v.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _steps(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    return call.randn(*shape).to(dtype) if call["gates"] else cases.steps(call, shape, dtype)


def decays(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Logarithms of decays, or the inputs that give them."""
    return (call.randn(*shape) - 1).to(dtype) if call["gates"] else cases.log_decay(call, shape, dtype)


ARGUMENTS = {
    "q": Tensor("q", "tokens key_heads dk"),
    "k": Tensor("k", "tokens key_heads dk", values=cases.of_length_one),
    "v": Tensor("v", "tokens heads dv"),
    "beta": Tensor("beta", "tokens heads", values=_steps),
    "state": cases.state("rows heads dk dv", "heads * dk * dv", values=cases.keys_inside),
}
SCALARS = (Scalar("scale", default=1.0), Scalar("normalize", default=False))
MORE = (Scalar("logarithm", default=False), Scalar("low", default=0.0))
AXES = {
    **cases.AXES,
    "key_heads": Axis.count(),
    "heads": Axis.count(),
    "dk": Axis.width(),
    "dv": Axis.width(),
}
CONSTRAINTS = (*cases.CONSTRAINTS, "heads % key_heads == 0")
FLOPS = "7 * tokens * heads * dk * dv"


def no_decay(args: list[T]) -> None:
    args[3].fill_(-1e-6)


def full_decay(args: list[T]) -> None:
    args[3].fill_(-60.0)


def equal_keys(args: list[T]) -> None:
    """One key for all tokens, with steps of 1 and no decay: each token replaces what the last one wrote."""
    args[1].copy_(args[1][:1].clone().expand_as(args[1]))
    args[4].fill_(1.0)
    no_decay(args)


EXTREMES = {"no_decay": no_decay, "full_decay": full_decay, "equal_keys": equal_keys}


def heads(key_heads: int, value_heads: int, dk: int, dv: int) -> dict[str, int]:
    return {"key_heads": key_heads, "heads": value_heads, "dk": dk, "dv": dv}


SPEC = OpSpec(
    name="gated_delta_rule",
    level=1,
    reference=reference,
    op=gated_delta_rule,
    arguments=(
        *(ARGUMENTS[n] for n in ("q", "k", "v")),
        Tensor("g", "tokens heads", "float32", values=decays),
        ARGUMENTS["beta"],
        ARGUMENTS["state"],
        *cases.TAIL,
        *SCALARS,
        Tensor("rate", "heads", "float32", when="gates", values=rates),
        Tensor("bias", "heads", "float32", when="gates"),
        *MORE,
    ),
    outputs=(Tensor("out", "tokens heads dv"),),
    axes=AXES,
    constraints=CONSTRAINTS,
    values=cases.values,
    flops=FLOPS,
    cases=(
        *cases.model_cases("qwen3_next", **heads(16, 32, 128, 128), scale=0.0883883, normalize=True),  # 80B
        cases.odd("one", {"seq_lens": (1,), **heads(1, 1, 1, 1)}, "float32"),
        cases.odd("odd_63", {"seq_lens": (7, 1, 4), **heads(3, 3, 20, 63), "new": 1}),
        cases.odd("scaled", {"seq_lens": (5, 9), **heads(2, 4, 33, 40), "scale": 0.25, "new": 2}, "float32"),
        cases.odd("normalized", {"seq_lens": (6, 2), **heads(2, 2, 64, 65), "normalize": True}, "float32"),
        cases.odd("decode_5", {**cases.decode(5), **heads(2, 6, 32, 32), "padding": 2, "normalize": True}),
        cases.odd("half_state", {"seq_lens": (4, 2), **heads(1, 2, 64, 16), "state_dtype": "float16"}),
        *cases.bf16_states(**heads(1, 2, 32, 16), normalize=True),
        cases.odd("empty", {"seq_lens": (0, 3), **heads(2, 2, 16, 8), "new": 2}, "float16"),
        cases.odd("chunks", {"seq_lens": (150,), **heads(1, 2, 24, 32), "new": 1, "normalize": True}),
        cases.odd("packed", {"seq_lens": (65, 3, 64, 20), **heads(2, 2, 16, 40), "new": 2, "padding": 1}, "float32"),
        cases.odd("wide_keys", {"seq_lens": (3,), **heads(1, 1, 200, 31)}),
        cases.odd("gates_5", {**cases.decode(5), **heads(2, 4, 32, 32), "gates": True, "logarithm": True}),
        cases.odd("gates", {"seq_lens": (2, 70), **heads(1, 2, 16, 16), "new": 1, "gates": True}, "float32"),
    ),
    activations=("q", "v"),
    contained="q",
    extremes=EXTREMES,
)  # fmt: skip
