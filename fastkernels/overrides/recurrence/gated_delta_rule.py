"""Gated delta rule (arXiv 2412.06464) and, without the correction, decayed linear attention as in Mamba 2.

S = exp(g) S;  S += k (beta (v - S^T k))^T;  o = scale S^T q      without `delta`: S += k (beta v)^T
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

WIDEST = 256  # channels of a key
T = torch.Tensor


def reference(
    q: T, k: T, v: T, g: T, beta: T, state: T, scale: float = 1.0, delta: bool = True
) -> tuple[T, T]:
    """q, k: [B, T, H, K]; v: [B, T, H, V]; g, beta: [B, T, H]; state: [B, H, K, V]. Computed in at least float32.

    Returns the outputs [B, T, H, V] in v's dtype and the new state.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    queries, keys, values, decay, step, s = (x.to(wide) for x in (q, k, v, g, beta, state))
    out = torch.empty_like(values)
    for t in range(v.shape[1]):
        s = s * decay[:, t, :, None, None].exp()
        key, value = keys[:, t, :, :, None], values[:, t, :, None, :]
        if delta:
            value = value - (s * key).sum(-2, keepdim=True)
        s = s + key * (value * step[:, t, :, None, None])
        out[:, t] = scale * (s * queries[:, t, :, :, None]).sum(-2)
    return out.to(v.dtype), s.to(state.dtype)


@triton.jit(do_not_specialize=["n_tokens", "g_b", "beta_b"])
def _gated_delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, n_tokens, H, K, V, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, s_b, s_h, s_k,
    DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    rows = tl.arange(0, BLOCK_K)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < K)[:, None] & (cols < V)[None, :]
    state_at = state_ptr + b * s_b + h * s_h + rows[:, None] * s_k + cols[None, :]
    s = tl.load(state_at, mask=inside, other=0.0).to(tl.float32)
    q_at = q_ptr + b * q_b + h * q_h + rows
    k_at = k_ptr + b * k_b + h * k_h + rows
    v_at = v_ptr + b * v_b + h * v_h + cols
    g_at = g_ptr + b * g_b + h * g_h
    beta_at = beta_ptr + b * beta_b + h * beta_h
    out_at = out_ptr + (b * n_tokens * H + h) * V + cols
    for _ in range(n_tokens):
        q = tl.load(q_at, mask=rows < K, other=0.0).to(tl.float32)
        k = tl.load(k_at, mask=rows < K, other=0.0).to(tl.float32)
        v = tl.load(v_at, mask=cols < V, other=0.0).to(tl.float32)
        s *= tl.exp(tl.load(g_at).to(tl.float32))
        if DELTA:
            v -= tl.sum(s * k[:, None], axis=0)
        s += k[:, None] * (v * tl.load(beta_at).to(tl.float32))[None, :]
        o = scale * tl.sum(s * q[:, None], axis=0)
        tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=cols < V)
        q_at += q_t
        k_at += k_t
        v_at += v_t
        g_at += g_t
        beta_at += beta_t
        out_at += H * V
    tl.store(state_at, s.to(state_ptr.dtype.element_ty), mask=inside)


def _supports_triton(
    q: T, k: T, v: T, g: T, beta: T, state: T, scale: float = 1.0, delta: bool = True
) -> str | None:
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}
    for name, x in named.items():
        if x.dtype not in FLOATS:
            return f"{name} is {x.dtype}, not float16, bfloat16 or float32"
        if x.dim() == 4 and x.stride(-1) != 1 and x.shape[-1] > 1:
            return f"{name} has stride {x.stride(-1)} in its last dimension, not 1"
    return f"{q.shape[-1]} channels of a key are over {WIDEST}" if q.shape[-1] > WIDEST else None


def _triton(
    q: T, k: T, v: T, g: T, beta: T, state: T, scale: float = 1.0, delta: bool = True
) -> torch.Tensor:
    batch, tokens, heads, channels = q.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    block = min(32, next_power_of_2(v.shape[-1]))
    launch_kernel(
        _gated_delta_rule_kernel, (batch * heads, cdiv(v.shape[-1], block)),
        q, k, v, g, beta, state, out, tokens, heads, channels, v.shape[-1], scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride(), *beta.stride(), *state.stride()[:3],
        DELTA=delta, BLOCK_K=next_power_of_2(channels), BLOCK_V=block, num_warps=4,
    )  # fmt: skip
    return out


def _reference(
    q: T, k: T, v: T, g: T, beta: T, state: T, scale: float = 1.0, delta: bool = True
) -> torch.Tensor:
    out, new = reference(q, k, v, g, beta, state, scale, delta)
    state.copy_(new)
    return out.contiguous()


gated_delta_rule = define(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, float scale=1.0,"
    " bool delta=True) -> Tensor",
    fake=lambda q, k, v, *rest: torch.empty(v.shape, dtype=v.dtype, device=v.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _keys(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of length 1: longer keys let the delta rule diverge."""
    made = call.randn(*shape)
    return (made / made.norm(dim=-1, keepdim=True).clamp_min(1e-6)).to(dtype)


def _decay(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (-call.rand(*shape)).to(dtype)


def _steps(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return call.rand(*shape).to(dtype)


SPEC = OpSpec(
    name="gated_delta_rule",
    level=1,
    reference=reference,
    op=gated_delta_rule,
    arguments=(
        Tensor("q", "batch tokens heads dk"),
        Tensor("k", "batch tokens heads dk", values=_keys),
        Tensor("v", "batch tokens heads dv"),
        Tensor("g", "batch tokens heads", "float32", values=_decay),
        Tensor("beta", "batch tokens heads", values=_steps),
        Tensor("state", "batch heads dk dv", "float32", mutated=True),
        Scalar("scale", default=1.0),
        Scalar("delta", default=True),
    ),
    outputs=(Tensor("out", "batch tokens heads dv"),),
    axes={
        "batch": Axis.per_call(),
        "tokens": Axis.per_call(),
        "heads": Axis.count(),
        "dk": Axis.width(),
        "dv": Axis.width(),
    },
    flops="batch * tokens * heads * dk * dv * (7 if delta else 5)",
    cases=(  # Qwen3-Next 80B: 32 heads of 128; Mamba 2 2.7B: 80 heads, 128 states, 64 channels
        Case(
            "decode_32",
            {"batch": 32, "tokens": 1, "heads": 32, "dk": 128, "dv": 128, "scale": 0.0883883},
            weight=36,
            tags=("model",),
        ),
        Case(
            "prefill_512",
            {"batch": 1, "tokens": 512, "heads": 32, "dk": 128, "dv": 128, "scale": 0.0883883},
            weight=1,
            tags=("model",),
        ),
        Case(
            "mamba_32",
            {"batch": 32, "tokens": 1, "heads": 80, "dk": 128, "dv": 64, "delta": False},
            weight=64,
            tags=("model",),
        ),
        Case(
            "one", {"batch": 1, "tokens": 1, "heads": 1, "dk": 1, "dv": 1, "delta": False}, "float32", tags=("odd",)
        ),
        Case("odd_63", {"batch": 2, "tokens": 7, "heads": 3, "dk": 20, "dv": 63}, tags=("odd",)),
        Case(
            "scaled", {"batch": 1, "tokens": 5, "heads": 2, "dk": 33, "dv": 40, "scale": 0.25}, "float32", tags=("odd",)
        ),
        Case(
            "mamba", {"batch": 2, "tokens": 9, "heads": 2, "dk": 16, "dv": 24, "delta": False}, "float16", tags=("odd",)
        ),
        Case("values_65", {"batch": 1, "tokens": 6, "heads": 2, "dk": 64, "dv": 65}, "float32", tags=("odd",)),
        Case("wide_keys", {"batch": 1, "tokens": 3, "heads": 1, "dk": 200, "dv": 31}, tags=("odd",)),
        Case("many", {"batch": 5, "tokens": 1, "heads": 7, "dk": 32, "dv": 32}, "float16", tags=("odd",)),
        Case("widest_keys", {"batch": 1, "tokens": 2, "heads": 1, "dk": 256, "dv": 8}, tags=("odd",)),
    ),
    activations=("q", "v"),
    batch_invariant=True,  # a program has one head of one sequence
)  # fmt: skip
