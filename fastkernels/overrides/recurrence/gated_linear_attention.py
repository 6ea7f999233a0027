"""Gated linear attention (arXiv 2312.06635) and, with one constant decay for each head, retention (arXiv 2307.08621).

S = diag(exp(g)) S + k v^T;  o = scale S^T q
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, OpSpec, Scalar, Tensor
from fastkernels.overrides.recurrence import cases
from fastkernels.overrides.recurrence.kernels.chunks import solve
from fastkernels.overrides.recurrence.kernels.problem import LINEAR, Problem, unsupported
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


def check(q: T, k: T, v: T, g: T, state: T) -> None:
    """Raise ValueError for shapes that contradict each other."""
    if q.dim() != 3 or v.dim() != 3:
        raise ValueError(
            f"gated_linear_attention: q {tuple(q.shape)} and v {tuple(v.shape)} must be [T, H, K] and [T, H, V]"
        )
    tokens, heads, keys = q.shape
    gates = {
        1: ((heads,), "[H]"),
        2: ((tokens, heads), "[T, H]"),
        3: ((tokens, heads, keys), "[T, H, K]"),
    }
    if g.dim() not in gates:
        raise ValueError(
            f"gated_linear_attention: g {tuple(g.shape)} must be [T, H, K], [T, H] or [H], with {heads} heads"
        )
    check_shapes(
        "gated_linear_attention", k=(k, tuple(q.shape), "[T, H, K]"), v=(v, (tokens, heads, v.shape[2]), "[T, H, V]"),
        g=(g, *gates[g.dim()]), state=(state, (state.shape[0], heads, keys, v.shape[2]), "[S, H, K, V]"),
    )  # fmt: skip


def reference(
    q: T, k: T, v: T, g: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0
) -> tuple[T, T]:
    """q, k: [T, H, K]; v: [T, H, V]; g: [T, H, K], [T, H] or [H], the logarithm of the decay; state: [S, H, K, V].

    cu_seqlens: [B + 1]; slots, fresh: [B]. Computed in at least float32. Returns the outputs [T, H, V] in v's dtype and
    the new state.
    """
    check(q, k, v, g, state)
    check_slots("gated_linear_attention", v, state, cu_seqlens, slots, fresh)
    acc = wide(v)
    queries, keys, values = (t.to(acc) for t in (q, k, v))
    decay = g.to(acc).exp()
    decay = decay.expand(len(v), -1) if g.dim() == 1 else decay
    decay = decay if g.dim() == 3 else decay[..., None]  # [T, H, K or 1]
    out = torch.zeros(v.shape, dtype=acc, device=v.device)

    def step(s: T, rows: T) -> tuple[T, T]:
        s = s * decay[rows][..., None] + keys[rows][..., None] * values[rows][..., None, :]
        return s, scale * (s * queries[rows][..., None]).sum(-2)

    last = scan(step, begin(state, slots, fresh, acc), cu_seqlens, out)
    return out.to(v.dtype), written(state, slots, last)


def _supports_triton(q: T, k: T, v: T, g: T, state: T, *_: Any) -> str | None:
    rows = (q, k, v, g) if g.dim() == 3 else (q, k, v)
    return unsupported(*rows, others=(g, state), keys=q.shape[-1])


def _triton(
    q: T, k: T, v: T, g: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0
) -> T:
    check(q, k, v, g, state)
    check_slots("gated_linear_attention", v, state, cu_seqlens, slots, fresh)
    return solve(Problem(q, k, v, g, state, cu_seqlens, slots, fresh, LINEAR, scale))


def _reference(
    q: T, k: T, v: T, g: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0
) -> T:
    out, new = reference(q, k, v, g, state, cu_seqlens, slots, fresh, scale)
    store(state, slots, new)
    return out.contiguous()


gated_linear_attention = define(
    "gated_linear_attention(Tensor q, Tensor k, Tensor v, Tensor g, Tensor(a!) state, Tensor? cu_seqlens, Tensor slots,"
    " Tensor? fresh, float scale=1.0) -> Tensor",
    fake=lambda q, k, v, *rest: torch.empty(v.shape, dtype=v.dtype, device=v.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _keys(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    return (call.randn(*shape) * shape[-1] ** -0.5).to(dtype)


def _ones(args: list[T]) -> None:
    args[3].fill_(-1e-6)


def _zeros(args: list[T]) -> None:
    args[3].fill_(-60.0)


def _heads(heads: int, dk: int, dv: int, gates: str = "channel") -> dict[str, int | str]:
    return {"heads": heads, "dk": dk, "dv": dv, "gates": gates}


SPEC = OpSpec(
    name="gated_linear_attention",
    level=1,
    reference=reference,
    op=gated_linear_attention,
    arguments=(
        Tensor("q", "tokens heads dk"),
        Tensor("k", "tokens heads dk", values=_keys),
        Tensor("v", "tokens heads dv"),
        Tensor(
            "g",
            {"gates == 'channel'": "tokens heads dk", "gates == 'token'": "tokens heads", "": "heads"},
            "float32",
            values=cases.log_decay,
        ),
        cases.state("rows heads dk dv", "heads * dk * dv", values=cases.keys_inside),
        *cases.TAIL,
        Scalar("scale", default=1.0),
    ),
    outputs=(Tensor("out", "tokens heads dv"),),
    axes={
        **cases.AXES,
        "gates": Axis("channel", read=lambda a: ("head", "token", "channel")[a.g.dim() - 1]),
        "heads": Axis.count(),
        "dk": Axis.width(),
        "dv": Axis.width(),
    },
    constraints=cases.CONSTRAINTS,
    values=cases.values,
    flops="5 * tokens * heads * dk * dv",
    cases=(
        *cases.model_cases("gla", **_heads(4, 256, 512), scale=0.0625),  # GLA 1.3B
        *cases.model_cases("retnet", **_heads(8, 256, 512, "head"), scale=0.0625),  # RetNet 1.3B
        cases.odd("one", {"seq_lens": (1,), **_heads(1, 1, 1)}, "float32"),
        cases.odd("odd_63", {"seq_lens": (7, 1, 4), **_heads(3, 20, 63), "new": 1}),
        cases.odd("token_gates", {"seq_lens": (5, 9), **_heads(2, 33, 40, "token"), "scale": 0.25}, "float32"),
        cases.odd("retention", {"seq_lens": (6, 2), **_heads(2, 16, 65, "head"), "new": 1}),
        cases.odd("decode_5", {**cases.decode(5), **_heads(3, 32, 32), "padding": 2}),
        cases.odd("half_state", {"seq_lens": (4, 2), **_heads(2, 64, 16, "token"), "state_dtype": "float16"}),
        *cases.bf16_states(**_heads(2, 32, 16)),
        cases.odd("bf16_state_of_heads", {"seq_lens": (66,), **_heads(2, 32, 16, "head"), "state_dtype": "bfloat16"}),
        cases.odd("empty", {"seq_lens": (0, 3), **_heads(2, 16, 8), "new": 2}, "float16"),
        cases.odd("chunks", {"seq_lens": (150,), **_heads(2, 24, 32), "new": 1, "scale": 0.25}),
        cases.odd("chunks_of_heads", {"seq_lens": (70, 66), **_heads(2, 16, 32, "head"), "new": 1, "scale": 0.25}),
        cases.odd("packed", {"seq_lens": (65, 3, 64, 20), **_heads(2, 16, 40), "new": 2, "padding": 1}, "float32"),
    ),
    activations=("q", "v"),
    contained="q",
    extremes={"no_decay": _ones, "full_decay": _zeros},
)  # fmt: skip
