"""State space duality of Mamba-2 (Dao and Gu, arXiv 2405.21060): one decay for each head, a state of P x N numbers.

S = exp(dt a) S + dt x b^T;  y = S c + d x      dt = clamp(softplus(dt + dt_bias), dt_min, dt_max)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, OpSpec, Scalar, Tensor
from fastkernels.overrides.recurrence import cases
from fastkernels.overrides.recurrence.kernels.chunks import solve
from fastkernels.overrides.recurrence.kernels.problem import STEP, Problem, unsupported
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


def _check(x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, state: T) -> None:
    if x.dim() != 3 or b.dim() != 3 or x.shape[1] % max(b.shape[1], 1):
        raise ValueError(
            f"ssd: x {tuple(x.shape)} and b {tuple(b.shape)} must be [T, H, P] and [T, G, N], where G divides H"
        )
    tokens, heads, size = x.shape
    group, each = ((tokens, *b.shape[1:]), "[T, G, N]"), ((heads,), "[H]")
    check_shapes(
        "ssd", dt=(dt, (tokens, heads), "[T, H]"), a=(a, *each), b=(b, *group), c=(c, *group), d=(d, *each),
        dt_bias=(dt_bias, *each), state=(state, (state.shape[0], heads, size, b.shape[2]), "[S, H, P, N]"),
    )  # fmt: skip


def reference(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None, slots: T,
    fresh: T | None, dt_min: float = 0.0, dt_max: float | None = None,
) -> tuple[T, T]:  # fmt: skip
    """x: [T, H, P]; dt: [T, H]; a, d, dt_bias: [H]; b, c: [T, G, N]; state: [S, H, P, N].

    cu_seqlens: [B + 1]; slots, fresh: [B]. Computed in at least float32. Returns the outputs in x's dtype and the new
    state.
    """
    _check(x, dt, a, b, c, d, dt_bias, state)
    check_slots("ssd", x, state, cu_seqlens, slots, fresh)
    acc, group = wide(x), x.shape[1] // b.shape[1]
    inputs, rate, delta = x.to(acc), a.to(acc), dt.to(acc)
    delta = F.softplus(delta if dt_bias is None else delta + dt_bias.to(acc)).clamp(dt_min, dt_max)
    keys, queries = (t.to(acc).repeat_interleave(group, 1) for t in (b, c))
    out = torch.zeros(x.shape, dtype=acc, device=x.device)

    def step(s: T, rows: T) -> tuple[T, T]:
        each = delta[rows]  # [B, H]
        s = s * (each * rate).exp()[..., None, None]
        s = s + (each[..., None] * inputs[rows])[..., None] * keys[rows][:, :, None]
        return s, (s * queries[rows][:, :, None]).sum(-1)

    last = scan(step, begin(state, slots, fresh, acc), cu_seqlens, out)
    out = out if d is None else out + d.to(acc)[:, None] * inputs
    return out.to(x.dtype), written(state, slots, last)


def _supports_triton(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, state: T, *_: Any
) -> str | None:
    return unsupported(x, b, c, a, d, dt_bias, others=(dt, state), keys=b.shape[-1])


def _triton(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None, slots: T,
    fresh: T | None, dt_min: float = 0.0, dt_max: float | None = None,
) -> T:  # fmt: skip
    _check(x, dt, a, b, c, d, dt_bias, state)
    check_slots("ssd", x, state, cu_seqlens, slots, fresh)
    return solve(
        Problem(
            c, b, x, dt, state.transpose(2, 3), cu_seqlens, slots, fresh, STEP,
            rate=a, bias=dt_bias, skip=d, low=dt_min, high=float("inf") if dt_max is None else dt_max,
        )
    )  # fmt: skip


def _reference(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None, slots: T,
    fresh: T | None, dt_min: float = 0.0, dt_max: float | None = None,
) -> T:  # fmt: skip
    out, new = reference(x, dt, a, b, c, d, dt_bias, state, cu_seqlens, slots, fresh, dt_min, dt_max)
    store(state, slots, new)
    return out.contiguous()


ssd = define(
    "ssd(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, Tensor(a!) state,"
    " Tensor? cu_seqlens, Tensor slots, Tensor? fresh, float dt_min=0.0, float? dt_max=None) -> Tensor",
    fake=lambda x, *rest: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _rates(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """-1 to -16, as Mamba-2 begins."""
    return -(1 + 15 * call.rand(*shape)).to(dtype)


def _ones(args: list[T]) -> None:
    args[1].fill_(-20)  # steps of nearly 0: decays near 1


def _zeros(args: list[T]) -> None:
    args[1].fill_(10)  # decays near 0
    args[0].mul_(0.1)


_ALL = {"skip": True, "bias": True}
_CLAMPED = {"dt_min": 0.01, "dt_max": 0.1}


def _heads(heads: int, size: int, states: int, groups: int = 1) -> dict[str, int]:
    return {"heads": heads, "size": size, "states": states, "groups": groups}


SPEC = OpSpec(
    name="ssd",
    level=1,
    reference=reference,
    op=ssd,
    arguments=(
        Tensor("x", "tokens heads size"),
        Tensor("dt", "tokens heads", mean=-3),
        Tensor("a", "heads", "float32", values=_rates),
        Tensor("b", "tokens groups states", std=0.5),
        Tensor("c", "tokens groups states", std=0.3),
        Tensor("d", "heads", "float32", when="skip"),
        Tensor("dt_bias", "heads", "float32", when="bias"),
        cases.state("rows heads size states", "heads * size * states"),
        *cases.TAIL,
        Scalar("dt_min", default=0.0),
        Scalar("dt_max", default=None),
    ),
    outputs=(Tensor("out", "tokens heads size"),),
    axes={
        **cases.AXES,
        "heads": Axis.count(),
        "groups": Axis.count(1),
        "size": Axis.width(),
        "states": Axis.width(),
    },
    constraints=(*cases.CONSTRAINTS, "heads % groups == 0"),
    values=cases.values,
    flops="6 * tokens * heads * size * states",
    cases=(
        *cases.model_cases("mamba2", **_heads(80, 64, 128), **_ALL),  # Mamba-2 2.7B
        *cases.model_decodes("mamba2_bf16_state", **_heads(80, 64, 128), **_ALL, state_dtype="bfloat16"),  # as served
        cases.odd("one", {"seq_lens": (1,), **_heads(1, 1, 1)}, "float32"),
        cases.odd("odd_63", {"seq_lens": (7, 1, 3), **_heads(4, 63, 20, 2), "new": 1, "bias": True}),
        cases.odd("clamped", {"seq_lens": (9, 4), **_heads(3, 16, 33), **_CLAMPED, "skip": True}, "float32"),
        cases.odd("decode_5", {**cases.decode(5), **_heads(6, 32, 16, 3), "padding": 2, **_ALL}),
        cases.odd("begins_3", {"seq_lens": (1,) * 3, **_heads(2, 16, 16), "decode": True, "new": 1, **_ALL}, "float32"),
        cases.odd("half_state", {"seq_lens": (4, 2), **_heads(2, 64, 16), "state_dtype": "float16"}),
        *cases.bf16_states(**_heads(4, 32, 16, 2), **_ALL),
        cases.odd("empty", {"seq_lens": (0, 6), **_heads(2, 8, 16), "new": 2}, "float16"),
        cases.odd("chunks", {"seq_lens": (150,), **_heads(8, 32, 24, 2), "new": 1, **_ALL}),
        cases.odd("packed", {"seq_lens": (65, 3, 64, 20), **_heads(2, 16, 16), "new": 2, "padding": 1}, "float32"),
    ),
    activations=("x",),
    contained="c",
    extremes={"no_decay": _ones, "full_decay": _zeros},
)  # fmt: skip
