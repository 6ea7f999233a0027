"""Kimi delta attention (arXiv 2510.26692): the gated delta rule with a decay for each channel of the keys.

S = diag(exp(g)) S;  S += k (beta (v - S^T k))^T;  o = scale S^T q
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Tensor
from fastkernels.overrides.recurrence import cases
from fastkernels.overrides.recurrence import gated_delta_rule as rule
from fastkernels.overrides.recurrence.delta_gates import rates
from fastkernels.overrides.recurrence.delta_gates import reference as gates_reference
from fastkernels.overrides.recurrence.gated_delta_rule import check, delta_rule
from fastkernels.overrides.recurrence.kernels.problem import DELTA, Problem
from fastkernels.overrides.recurrence.packed import check_slots, store

T = torch.Tensor


def reference(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, rate: T | None = None, bias: T | None = None, logarithm: bool = False, low: float = 0.0,
) -> tuple[T, T]:  # fmt: skip
    """q, k: [T, Hk, K]; v: [T, Hv, V]; g: [T, Hv, K]; beta: [T, Hv]; state: [S, Hv, K, V].

    cu_seqlens: [B + 1]; slots, fresh: [B]. normalize: divide queries and keys by their length. rate: [Hv]; bias:
    [Hv, K]; these, logarithm and low as in delta_gates. Computed in at least float32. Returns the outputs [T, Hv, V] in
    v's dtype and the new state.
    """
    check("kda", q, k, v, g, beta, state, True, rate, bias)
    check_slots("kda", v, state, cu_seqlens, slots, fresh)
    if rate is not None and bias is not None:
        g, beta = gates_reference(g, beta, rate, bias, logarithm, low)
    return delta_rule(q, k, v, g, beta, state, cu_seqlens, slots, fresh, scale, normalize)


def _supports_triton(*args: Any) -> str | None:
    return rule.supports(*args)


def _triton(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, rate: T | None = None, bias: T | None = None, logarithm: bool = False, low: float = 0.0,
) -> T:  # fmt: skip
    check("kda", q, k, v, g, beta, state, True, rate, bias)
    check_slots("kda", v, state, cu_seqlens, slots, fresh)
    return rule.solved(
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


kda = define(
    "kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor? cu_seqlens, Tensor slots,"
    " Tensor? fresh, float scale=1.0, bool normalize=False, Tensor? rate=None, Tensor? bias=None, bool logarithm=False,"
    " float low=0.0) -> Tensor",
    fake=lambda q, k, v, *rest: torch.empty(v.shape, dtype=v.dtype, device=v.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)

HEADS = rule.heads(2, 2, 16, 40)

SPEC = OpSpec(
    name="kda",
    level=1,
    reference=reference,
    op=kda,
    arguments=(
        *(rule.ARGUMENTS[n] for n in ("q", "k", "v")),
        Tensor("g", "tokens heads dk", "float32", values=rule.decays),
        rule.ARGUMENTS["beta"],
        rule.ARGUMENTS["state"],
        *cases.TAIL,
        *rule.SCALARS,
        Tensor("rate", "heads", "float32", when="gates", values=rates),
        Tensor("bias", "heads dk", "float32", when="gates"),
        *rule.MORE,
    ),
    outputs=(Tensor("out", "tokens heads dv"),),
    axes=rule.AXES,
    constraints=rule.CONSTRAINTS,
    values=cases.values,
    flops=rule.FLOPS,
    cases=(
        *cases.model_cases("kimi_linear", **rule.heads(32, 32, 128, 128), scale=0.0883883, normalize=True),  # 48B
        cases.odd("one", {"seq_lens": (1,), **rule.heads(1, 1, 1, 1)}, "float32"),
        cases.odd("odd_63", {"seq_lens": (7, 1, 4), **rule.heads(3, 3, 20, 63), "new": 1}),
        cases.odd("scaled", {"seq_lens": (5, 9), **rule.heads(2, 4, 33, 40), "scale": 0.25, "new": 2}, "float32"),
        cases.odd("decode_5", {**cases.decode(5), **rule.heads(2, 6, 32, 32), "padding": 2, "normalize": True}),
        cases.odd("half_state", {"seq_lens": (4, 2), **rule.heads(1, 2, 64, 16), "state_dtype": "float16"}),
        *cases.bf16_states(**rule.heads(2, 2, 32, 32), normalize=True),
        cases.odd("empty", {"seq_lens": (0, 3), **rule.heads(2, 2, 16, 8), "new": 2}, "float16"),
        cases.odd("chunks", {"seq_lens": (150,), **rule.heads(1, 2, 24, 32), "new": 1, "normalize": True}),
        cases.odd("packed", {"seq_lens": (65, 3, 64, 20), **HEADS, "new": 2, "padding": 1}, "float32"),
        cases.odd("wide_keys", {"seq_lens": (3,), **rule.heads(1, 1, 200, 31)}),
        cases.odd("gates_5", {**cases.decode(5), **rule.heads(2, 4, 32, 32), "gates": True, "logarithm": True}),
        cases.odd("bounded", {"seq_lens": (2, 70), **HEADS, "new": 1, "gates": True, "low": -5.0}, "float32"),
    ),
    activations=("q", "v"),
    contained="q",
    extremes=rule.EXTREMES,
)  # fmt: skip
