"""RWKV-7's recurrence (Peng et al., arXiv 2503.14456): a delta rule whose erased and written directions differ.

S = diag(exp(w)) S + b (S^T a)^T + k v^T, with the old S on the right;  o = scale S^T r
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, OpSpec, Scalar, Tensor
from fastkernels.overrides.recurrence import cases
from fastkernels.overrides.recurrence.kernels.chunks import solve
from fastkernels.overrides.recurrence.kernels.problem import PAIR, Problem, unsupported
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


def check(r: T, w: T, k: T, v: T, a: T, b: T, state: T) -> None:
    """Raise ValueError for shapes that contradict each other."""
    if r.dim() != 3 or v.dim() != 3:
        raise ValueError(f"rwkv7: r {tuple(r.shape)} and v {tuple(v.shape)} must be [T, H, K] and [T, H, V]")
    tokens, heads, keys = r.shape
    each = tuple(r.shape), "[T, H, K]"
    check_shapes(
        "rwkv7", w=(w, *each), k=(k, *each), a=(a, *each), b=(b, *each),
        v=(v, (tokens, heads, v.shape[2]), "[T, H, V]"),
        state=(state, (state.shape[0], heads, keys, v.shape[2]), "[S, H, K, V]"),
    )  # fmt: skip


def reference(
    r: T, w: T, k: T, v: T, a: T, b: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0
) -> tuple[T, T]:  # fmt: skip
    """r, w, k, a, b: [T, H, K], w the logarithm of the decay; v: [T, H, V]; state: [S, H, K, V].

    cu_seqlens: [B + 1]; slots, fresh: [B]. RWKV-7 has a = -kappa and b = kappa * rate, with kappa of length 1.
    Computed in at least float32. Returns the outputs [T, H, V] in v's dtype and the new state.
    """
    check(r, w, k, v, a, b, state)
    check_slots("rwkv7", v, state, cu_seqlens, slots, fresh)
    acc = wide(v)
    queries, decay, keys, values, erased, into = (t.to(acc) for t in (r, w, k, v, a, b))
    out = torch.zeros(v.shape, dtype=acc, device=v.device)

    def step(s: T, rows: T) -> tuple[T, T]:
        found = (s * erased[rows][..., None]).sum(-2, keepdim=True)
        s = s * decay[rows].exp()[..., None] + into[rows][..., None] * found
        s = s + keys[rows][..., None] * values[rows][..., None, :]
        return s, scale * (s * queries[rows][..., None]).sum(-2)

    last = scan(step, begin(state, slots, fresh, acc), cu_seqlens, out)
    return out.to(v.dtype), written(state, slots, last)


def _supports_triton(r: T, w: T, k: T, v: T, a: T, b: T, state: T, *_: Any) -> str | None:
    return unsupported(r, w, k, v, a, b, others=(state,), keys=r.shape[-1])


def _triton(
    r: T, w: T, k: T, v: T, a: T, b: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0
) -> T:  # fmt: skip
    check(r, w, k, v, a, b, state)
    check_slots("rwkv7", v, state, cu_seqlens, slots, fresh)
    return solve(Problem(r, k, v, w, state, cu_seqlens, slots, fresh, PAIR, scale, a=a, b=b))


def _reference(
    r: T, w: T, k: T, v: T, a: T, b: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0
) -> T:  # fmt: skip
    out, new = reference(r, w, k, v, a, b, state, cu_seqlens, slots, fresh, scale)
    store(state, slots, new)
    return out.contiguous()


rwkv7 = define(
    "rwkv7(Tensor r, Tensor w, Tensor k, Tensor v, Tensor a, Tensor b, Tensor(a!) state, Tensor? cu_seqlens,"
    " Tensor slots, Tensor? fresh, float scale=1.0) -> Tensor",
    fake=lambda r, w, k, v, *rest: torch.empty(v.shape, dtype=v.dtype, device=v.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, T]:
    """As RWKV-7 makes them: a direction of length 1, a rate of 0 to 1 for each channel."""
    kappa = cases.of_length_one(call, call.tensor("k").shape, torch.float32)
    dtype = call.tensor("k").dtype
    return {
        **cases.values(call),
        "a": -kappa.to(dtype),
        "b": (kappa * call.rand(*kappa.shape)).to(dtype),
    }


def _decay(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """From exp(-0.5) upwards, the least that RWKV-7 has."""
    return (-0.606531 * torch.sigmoid(2 * call.randn(*shape) - 1)).to(dtype)


def _ones(args: list[T]) -> None:
    args[1].fill_(-1e-6)


def _zeros(args: list[T]) -> None:
    args[1].fill_(-60.0)


def _equal(args: list[T]) -> None:
    """One direction and key for all tokens, fully erased, with no decay."""
    for i in (2, 4):
        args[i].copy_(args[i][:1].clone().expand_as(args[i]))
    args[5].copy_(-args[4])
    _ones(args)


def _heads(heads: int, dk: int, dv: int) -> dict[str, int]:
    return {"heads": heads, "dk": dk, "dv": dv}


SPEC = OpSpec(
    name="rwkv7",
    level=1,
    reference=reference,
    op=rwkv7,
    arguments=(
        Tensor("r", "tokens heads dk"),
        Tensor("w", "tokens heads dk", "decay_dtype", values=_decay),
        Tensor("k", "tokens heads dk", std=0.3),
        Tensor("v", "tokens heads dv"),
        Tensor("a", "tokens heads dk"),
        Tensor("b", "tokens heads dk"),
        cases.state("rows heads dk dv", "heads * dk * dv", values=cases.keys_inside),
        *cases.TAIL,
        Scalar("scale", default=1.0),
    ),
    outputs=(Tensor("out", "tokens heads dv"),),
    axes={
        **cases.AXES,
        "decay_dtype": Axis.dtype("float32"),
        "heads": Axis.count(),
        "dk": Axis.width(),
        "dv": Axis.width(),
    },
    constraints=cases.CONSTRAINTS,
    values=_values,
    flops="8 * tokens * heads * dk * dv",
    cases=(
        *cases.model_cases("rwkv7", **_heads(40, 64, 64), scale=0.125),  # RWKV-7 2.9B
        cases.odd("one", {"seq_lens": (1,), **_heads(1, 1, 1)}, "float32"),
        cases.odd("odd_63", {"seq_lens": (7, 1, 4), **_heads(3, 20, 63), "new": 1}),
        cases.odd("scaled", {"seq_lens": (5, 9), **_heads(2, 33, 40), "scale": 0.25, "new": 2}, "float32"),
        cases.odd("half_decay", {"seq_lens": (6, 2), **_heads(2, 16, 33), "decay_dtype": "bfloat16"}),
        cases.odd("decode_5", {**cases.decode(5), **_heads(3, 32, 32), "padding": 2}),
        cases.odd("half_state", {"seq_lens": (4, 2), **_heads(2, 64, 16), "state_dtype": "float16"}),
        *cases.bf16_states(**_heads(2, 32, 16), scale=0.125),
        cases.odd("empty", {"seq_lens": (0, 3), **_heads(2, 16, 8), "new": 2}, "float16"),
        cases.odd("chunks", {"seq_lens": (150,), **_heads(2, 24, 32), "new": 1, "scale": 0.125}),
        cases.odd("packed", {"seq_lens": (65, 3, 64, 20), **_heads(2, 16, 40), "new": 2, "padding": 1}, "float32"),
    ),
    activations=("r", "v"),
    contained="r",
    extremes={"no_decay": _ones, "full_decay": _zeros, "equal_keys": _equal},
)  # fmt: skip
