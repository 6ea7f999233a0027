"""Attention with a bias that many rows share, and a gate: Algorithms 14, 15 and 24 of AlphaFold 3's supplement.

In triangle attention the rows are those of the pair representation, in the diffusion transformer its samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import cases
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.softmax import weights_of
from fastkernels.overrides.structure.pairs import close

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, gate: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """q: [B, I, Q, H, D]; k, v: [B, I, K, H, D]; bias: [B, H, Q, K]; gate: [B, I, Q, H, D] or None.

    mask: [B, I or 1, K] bool or None: False hides a key; a query that sees no key gives zeros.
    Returns sigmoid(gate) * softmax(scale * q k + bias) v, [B, I, Q, H, D] in q's dtype, computed in at least float32.
    """
    _check(q, k, v, bias, mask, gate)
    acc = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("biqhd,bikhd->bihqk", q.to(acc), k.to(acc)) * scale + bias.to(acc)[:, None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None, None], float("-inf"))
    found = torch.einsum("bihqk,bikhd->biqhd", weights_of(scores), v.to(acc))
    return (found if gate is None else found * gate.to(acc).sigmoid()).to(q.dtype)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> None:  # fmt: skip
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 5 or k.shape != v.shape or k.shape != (*q.shape[:2], *k.shape[2:3], *q.shape[3:]):
        raise ValueError(
            f"attention_pair_bias: q must be [B, I, Q, H, D], k and v [B, I, K, H, D], got {shapes}"
        )
    batch, rows, queries, heads, _ = q.shape
    keys = k.shape[2]
    if bias.shape != (batch, heads, queries, keys):
        raise ValueError(
            f"attention_pair_bias: bias must be [B, H, Q, K] = {(batch, heads, queries, keys)}, got"
            f" {tuple(bias.shape)}"
        )
    if mask is not None and (
        mask.dtype != torch.bool or tuple(mask.shape) not in [(batch, n, keys) for n in (1, rows)]
    ):
        raise ValueError(
            f"attention_pair_bias: mask must be bool [B, I or 1, K] with {(batch, rows, keys)}, got {mask.dtype}"
            f" {tuple(mask.shape)}"
        )
    if gate is not None and gate.shape != q.shape:
        raise ValueError(
            f"attention_pair_bias: gate {tuple(gate.shape)} does not have q's shape {tuple(q.shape)}"
        )


@triton.jit(do_not_specialize=["n_rows", "n_q", "n_k"])
def _attention_pair_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, gate_ptr, out_ptr, n_rows, n_q, n_k,
    q_stride_b, q_stride_i, q_stride_t, q_stride_h, k_stride_b, k_stride_i, k_stride_t, k_stride_h,
    v_stride_b, v_stride_i, v_stride_t, v_stride_h, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    mask_stride_b, mask_stride_i, mask_stride_k, gate_stride_b, gate_stride_i, gate_stride_t, gate_stride_h,
    out_stride_b, out_stride_i, out_stride_t, out_stride_h, D, scale,
    HAS_MASK: tl.constexpr, HAS_GATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per (row, head, block of queries). Rows are the fastest: neighbors read the same block of the bias.
    follow(OVERLAP)
    LOG2E: tl.constexpr = 1.4426950408889634
    place = tl.program_id(0)
    b, i = (place // n_rows).to(tl.int64), (place % n_rows).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    queries = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    inside, known = (queries < n_q)[:, None], (dims < D)[None, :]
    q_at = q_ptr + b * q_stride_b + i * q_stride_i + head * q_stride_h + queries[:, None] * q_stride_t
    q = tl.load(q_at + dims[None, :], mask=inside & known, other=0.0)
    k_at = k_ptr + b * k_stride_b + i * k_stride_i + head * k_stride_h
    v_at = v_ptr + b * v_stride_b + i * v_stride_i + head * v_stride_h
    bias_at = bias_ptr + b * bias_stride_b + head * bias_stride_h + queries[:, None] * bias_stride_q
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, n_k, BLOCK_N):
        keys = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        here = keys < n_k
        k = tl.load(k_at + keys[:, None] * k_stride_t + dims[None, :], mask=here[:, None] & known, other=0.0)
        bias = tl.load(bias_at + keys[None, :] * bias_stride_k, mask=inside & here[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        scores += bias.to(tl.float32) * LOG2E
        seen = here
        if HAS_MASK:
            mask_at = mask_ptr + b * mask_stride_b + i * mask_stride_i + keys * mask_stride_k
            seen = seen & (tl.load(mask_at, mask=here, other=0) != 0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # before the first key that is seen
        p = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        v = tl.load(v_at + keys[:, None] * v_stride_t + dims[None, :], mask=here[:, None] & known, other=0.0)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_GATE:
        gate_at = gate_ptr + b * gate_stride_b + i * gate_stride_i + head * gate_stride_h
        gate = tl.load(
            gate_at + queries[:, None] * gate_stride_t + dims[None, :], mask=inside & known, other=0.0
        )
        acc = acc / (1.0 + tl.exp(-gate.to(tl.float32)))
    out_at = (
        out_ptr + b * out_stride_b + i * out_stride_i + head * out_stride_h + queries[:, None] * out_stride_t
    )
    tl.store(out_at + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside & known)


def _empty(q: torch.Tensor) -> torch.Tensor:
    """The result's memory: rows and queries lie as those of q, so that a transposed pair representation stays one."""
    batch, rows, queries, heads, dim = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, queries, rows, heads, dim).transpose(1, 2)
    return q.new_empty(q.shape)


def _supports_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, gate: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if q.dtype not in FLOATS or {k.dtype, v.dtype, *([] if gate is None else [gate.dtype])} != {q.dtype}:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all float16, all bfloat16 or all float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if q.shape[4] > 128:
        return f"head size {q.shape[4]} is over 128"
    if q.shape[3] > 65535 or cdiv(q.shape[2], 16) > 65535:
        return f"{q.shape[3]} heads or {q.shape[2]} queries are too many for a grid"
    for name, t in (("q", q), ("k", k), ("v", v), ("gate", gate)):
        if t is not None and t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, gate: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(q, k, v, bias, mask, gate)
    out = _empty(q)
    if out.numel() == 0:
        return out
    batch, rows, queries, heads, dim = q.shape
    keys, single = k.shape[2], q.dtype == torch.float32
    block_d = max(next_power_of_2(dim), 16)
    block_m = 16 if queries <= 16 else 32 if queries <= 32 else 64 if single or queries <= 64 else 128
    block_n = 16 if keys <= 16 else 32 if keys <= 32 or single else 64
    mask_strides = (0, 0, 0) if mask is None else mask.expand(batch, rows, keys).stride()
    exact = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch_kernel(
        _attention_pair_bias_kernel, (batch * rows, heads, cdiv(queries, block_m)),
        q, k, v, bias, mask, gate, out, rows, queries, keys, *q.stride()[:4], *k.stride()[:4], *v.stride()[:4],
        *bias.stride(), *mask_strides, *((0, 0, 0, 0) if gate is None else gate.stride()[:4]), *out.stride()[:4],
        dim, scale, HAS_MASK=mask is not None, HAS_GATE=gate is not None, PRECISION=exact if single else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=8 if block_m == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


def _torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, gate: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(q, k, v, bias, mask, gate)
    out = _empty(q)
    if out.numel() == 0:
        return out
    added = bias.to(q.dtype)[:, None]
    if mask is not None:  # a number instead of -inf: a row without a key is no NaN
        least = torch.finfo(q.dtype).min / 2
        added = (
            added
            + torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, least)[
                :, :, None, None
            ]
        )
    for b in range(q.shape[0]):
        found = torch.nn.functional.scaled_dot_product_attention(
            q[b].transpose(1, 2), k[b].transpose(1, 2), v[b].transpose(1, 2), added[b], scale=scale
        ).transpose(1, 2)
        if mask is not None:
            found = found.masked_fill(~mask[b].any(-1)[:, None, None, None], 0.0)
        out[b] = found if gate is None else found * gate[b].sigmoid()
    return out


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, gate: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return _empty(q).copy_(reference(q, k, v, bias, scale, mask, gate))


attention_pair_bias = define(
    "attention_pair_bias(Tensor q, Tensor k, Tensor v, Tensor bias, float scale, Tensor? mask=None, Tensor? gate=None)"
    " -> Tensor",
    fake=lambda q, *args, **kwargs: _empty(q),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("sdpa", _torch, devices=("cuda", "cpu")),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _mask(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that hides a fifth of the keys, and all of them from the first row where each row has its own."""
    seen = call.rand(*shape) >= 0.2
    if shape[1] > 1:
        seen[:, 0] = False
    return seen


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: int | bool) -> Case:
    dims.setdefault("keys", dims["queries"])
    dims.setdefault("gated", True)
    return Case(name, {"batch": 1, **dims}, dtype, weight, (tag,))


def _pairs(n: int, tag: str = "model", dtype: str = "bfloat16", heads: int = 4, dim: int = 32) -> Case:
    dims = {"rows": n, "queries": n, "heads": heads, "head_size": dim, "masked": True}
    return _case(f"triangle_{n}", tag, dtype, 96, **dims)


_OUT = "batch rows queries heads head_size"

SPEC = OpSpec(
    name="attention_pair_bias",
    level=2,
    reference=reference,
    op=attention_pair_bias,
    cases=(  # OpenFold3: triangle attention of 48 blocks, the diffusion transformer's 24 with 5 samples, single tokens
        *(_pairs(n) for n in (150, 400, 700)),
        *(
            _case(f"diffusion_{n}", "model", weight=24, rows=5, queries=n, heads=16, head_size=48, masked=True)
            for n in (150, 400, 700)
        ),
        _case("single_400", "model", weight=48, rows=1, queries=400, heads=16, head_size=24, masked=True),
        _case("one", "odd", "float32", rows=1, queries=1, heads=1, head_size=1),
        _case("rows_5", "odd", "float32", rows=5, queries=5, heads=2, head_size=8, masked=True, mask_rows=True),
        _case("odd_17", "odd", "float32", batch=2, rows=3, queries=17, heads=3, head_size=24, masked=True),
        _case("half", "odd", "float16", rows=2, queries=33, heads=2, head_size=48, masked=True),
        _case("no_gate", "odd", rows=2, queries=20, keys=41, heads=2, head_size=16, gated=False),
        _case("two", "odd", "float16", batch=2, rows=2, queries=9, heads=1, head_size=40),
        _case("window", "odd", "float32", rows=2, queries=32, keys=70, heads=4, head_size=32),
    ),
    arguments=(
        Tensor("q", _OUT),
        Tensor("k", "batch rows keys heads head_size"),
        Tensor("v", "batch rows keys heads head_size"),
        Tensor("bias", "batch heads queries keys"),
        Scalar("scale"),
        Tensor("mask", "batch masks keys", "bool", when="masked", values=_mask),
        Tensor("gate", _OUT, when="gated"),
    ),
    outputs=(Tensor("out", _OUT),),
    axes={
        "batch": Axis.per_call(),
        "rows": Axis.per_call(),
        "queries": Axis.per_call(draw=close),
        "keys": Axis.per_call(draw=close),
        "heads": Axis.count(),
        "head_size": Axis.width(),
        "scale": Axis(Expr("head_size ** -0.5")),
        "mask_rows": Axis(False, read=lambda a: None if a.mask is None else a.mask.shape[1] > 1),
        "masks": Axis(lambda s: s["rows"] if s["mask_rows"] else 1),
    },
    constraints=("head_size <= 128",),
    flops="4 * batch * rows * queries * keys * heads * head_size",
    extremes=cases.EXTREMES,
    activations=("v",),
    contained="q",
    baseline="sdpa",
)  # fmt: skip
