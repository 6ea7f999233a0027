"""Attention of prompts in multi-head latent attention, over keys and values that kv_b_proj has expanded.

Each head has a key [nope; rotary], whose rotary part all heads share, and a value of another size. Both parts of the
key and the value are read where the projection and the cache have them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.shapes import near, near_size, varied
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import cases
from fastkernels.overrides.dense_attention import attention_dense_cuda as dense
from fastkernels.overrides.kit.hopper import no_hopper
from fastkernels.overrides.kit.launch import next_power_of_2, shared_memory
from fastkernels.overrides.kit.overlap import overlaps
from fastkernels.overrides.kit.softmax import weights_of

LOG2_E = 1.4426950408889634
LARGE_TILE = 172_032  # bytes of shared memory of 128 rows and three stages of 64 keys, in 16 bits


def reference(
    q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, cu_seqlens_q: torch.Tensor, starts: torch.Tensor,
    seq_lens: torch.Tensor, max_seqlen_q: int, scale: float, padded: bool = True,
) -> torch.Tensor:  # fmt: skip
    """q: [T, H, N + P], rotated; kv: [K, H, N + V]; k_rope: [K, P]; cu_seqlens_q: [B + 1]; starts, seq_lens: [B] int32.

    The keys of sequence i are rows starts[i] .. starts[i] + seq_lens[i] - 1. Its queries are its last tokens, from
    cu_seqlens_q[i] on: query j of n sees keys 0 .. seq_len - n + j. max_seqlen_q: at least the most queries of a
    sequence. padded: there may be queries that belong to no sequence, whose results are 0; otherwise they are
    undefined. Returns [T, H, V] in q's dtype.
    """
    _check(q, kv, k_rope)
    acc = torch.promote_types(q.dtype, torch.float32)
    nope = q.shape[2] - k_rope.shape[1]
    out = torch.zeros(*q.shape[:2], kv.shape[2] - nope, dtype=q.dtype, device=q.device)
    firsts = cu_seqlens_q.tolist()
    for i, (start, n_keys) in enumerate(zip(starts.tolist(), seq_lens.tolist(), strict=True)):
        rows, keys = slice(firsts[i], firsts[i + 1]), slice(start, start + n_keys)
        n = rows.stop - rows.start
        if n == 0 or n_keys == 0:
            continue
        query, key = q[rows].to(acc), kv[keys].to(acc)
        scores = torch.einsum("nhd,khd->hnk", query[..., :nope], key[..., :nope])
        scores = (scores + torch.einsum("nhd,kd->hnk", query[..., nope:], k_rope[keys].to(acc))) * scale
        last = torch.arange(n_keys - n, n_keys, device=q.device)[:, None]
        seen = torch.arange(n_keys, device=q.device)[None, :] <= last
        weights = weights_of(scores.masked_fill(~seen, float("-inf")))
        out[rows] = torch.einsum("hnk,khv->nhv", weights, key[..., nope:]).to(q.dtype)
    return out


@triton.jit
def _attend_keys(
    acc, total, top, q, q_rope, k_at, r_at, v_at, kv_stride, rope_stride, low, high, last, scale,
    N: tl.constexpr, P: tl.constexpr, V: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # Keys low .. high - 1; with EDGE not every row sees all of them. `scale` is of exponents to the base 2.
    d, r, v_channel = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    for begin in range(low, high, BLOCK_N):
        cols = begin + tl.arange(0, BLOCK_N)
        at = cols.to(tl.int64)[:, None]
        k_from, r_from = k_at + at * kv_stride + d[None, :], r_at + at * rope_stride + r[None, :]
        v_from = v_at + at * kv_stride + v_channel[None, :]
        if EDGE or N != BLOCK_D or P != BLOCK_P or V != BLOCK_V:
            inside = (cols < high)[:, None]
            k = tl.load(k_from, mask=inside & (d < N)[None, :], other=0.0)
            k_rope = tl.load(r_from, mask=inside & (r < P)[None, :], other=0.0)
        else:
            k, k_rope = tl.load(k_from), tl.load(r_from)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION) * scale
        if EDGE:
            scores = tl.where(
                (cols[None, :] <= last[:, None]) & (cols < high)[None, :], scores, float("-inf")
            )
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Before the first key, -inf - -inf would be NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        if EDGE or N != BLOCK_D or P != BLOCK_P or V != BLOCK_V:
            v = tl.load(v_from, mask=(cols < high)[:, None] & (v_channel < V)[None, :], other=0.0)
        else:
            v = tl.load(v_from)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["batch"])
def _mla_expanded_kernel(
    q_ptr, kv_ptr, rope_ptr, out_ptr, cu_ptr, start_ptr, len_ptr, q_stride_t, q_stride_h, kv_stride_t, kv_stride_h,
    rope_stride, out_stride_t, out_stride_h, batch, heads, scale,
    N: tl.constexpr, P: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # One program per (head, block of queries): neighbors read the same keys. Late queries see the most: they go first.
    # The grid depends on shapes only: blocks of sequence i begin at number i + (queries before it) // BLOCK_M.
    blocks = tl.num_programs(0) // heads
    head = (tl.program_id(0) // blocks).to(tl.int64)
    block = blocks - 1 - tl.program_id(0) % blocks
    before = tl.load(cu_ptr)
    seq, most = batch * 0, batch - 1
    while seq < most:
        middle = (seq + most + 1) // 2
        is_past = (tl.load(cu_ptr + middle) - before) // BLOCK_M + middle > block
        seq, most = tl.where(is_past, seq, middle), tl.where(is_past, middle - 1, most)
    start = tl.load(cu_ptr + seq)
    n_q = tl.load(cu_ptr + seq + 1) - start
    n_k = tl.load(len_ptr + seq)
    first = (block - seq - (start - before) // BLOCK_M) * BLOCK_M
    if first < n_q:
        rows = first + tl.arange(0, BLOCK_M)
        d, r, v_channel = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
        there = (rows < n_q)[:, None]
        tokens = (start + rows).to(tl.int64)[:, None]
        q_at = q_ptr + tokens * q_stride_t + head * q_stride_h
        q = tl.load(q_at + d[None, :], mask=there & (d < N)[None, :], other=0.0)
        q_rope = tl.load(q_at + N + r[None, :], mask=there & (r < P)[None, :], other=0.0)
        key = tl.load(start_ptr + seq).to(tl.int64)
        k_at = kv_ptr + key * kv_stride_t + head * kv_stride_h
        r_at, v_at = rope_ptr + key * rope_stride, k_at + N
        last = n_k - n_q + rows
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        # All rows see the keys before the first row's own, in whole blocks.
        edge = tl.maximum(tl.minimum(n_k - n_q + first + 1, n_k), 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(n_k - n_q + first + BLOCK_M, n_k)
        acc, total, top = _attend_keys(
            acc, total, top, q, q_rope, k_at, r_at, v_at, kv_stride_t, rope_stride, 0, edge, last, scale, N, P, V,
            False, PRECISION, BLOCK_N, BLOCK_D, BLOCK_P, BLOCK_V,
        )  # fmt: skip
        acc, total, top = _attend_keys(
            acc, total, top, q, q_rope, k_at, r_at, v_at, kv_stride_t, rope_stride, edge, high, last, scale, N, P, V,
            True, PRECISION, BLOCK_N, BLOCK_D, BLOCK_P, BLOCK_V,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = out_ptr + tokens * out_stride_t + head * out_stride_h + v_channel[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=there & (v_channel < V)[None, :])


def _check(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor) -> None:
    if (
        q.dim() != 3
        or kv.dim() != 3
        or k_rope.dim() != 2
        or q.shape[1] != kv.shape[1]
        or len(kv) != len(k_rope)
    ):
        raise ValueError(
            f"mla_expanded: q [T, H, N + P], kv [K, H, N + V] and k_rope [K, P] do not match: {tuple(q.shape)},"
            f" {tuple(kv.shape)} and {tuple(k_rope.shape)}"
        )
    nope = q.shape[2] - k_rope.shape[1]
    if not 0 < nope < kv.shape[2]:
        raise ValueError(
            f"mla_expanded: {q.shape[2]} channels of q and {k_rope.shape[1]} of k_rope leave {nope} of {kv.shape[2]}"
            " for keys without positions"
        )


def _supports_triton(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, *_: Any) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {q.dtype} is not float16, bfloat16 or float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if max(q.shape[2], kv.shape[2]) > 1024:
        return f"{max(q.shape[2], kv.shape[2])} channels are over 1024"
    for name, t in (("q", q), ("kv", kv), ("k_rope", k_rope)):
        if t.dtype != q.dtype:
            return f"{name} is {t.dtype}, q is {q.dtype}"
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, cu_seqlens_q: torch.Tensor, starts: torch.Tensor,
    seq_lens: torch.Tensor, max_seqlen_q: int, scale: float, padded: bool = True,
) -> torch.Tensor:  # fmt: skip
    _check(q, kv, k_rope)
    (tokens, heads, size), rope, batch = q.shape, k_rope.shape[1], len(seq_lens)
    nope = size - rope
    value = kv.shape[2] - nope
    make = torch.zeros if padded else torch.empty
    out = make((tokens, heads, value), dtype=q.dtype, device=q.device)
    if batch == 0 or max_seqlen_q == 0:
        return out
    sizes = [max(next_power_of_2(n), 16) for n in (nope, rope, value)]
    fits = (
        shared_memory(q.device) >= LARGE_TILE
        and q.dtype != torch.float32
        and sizes[0] + sizes[2] <= 256
        and sizes[1] <= 64
    )
    block_m, block_n, warps, stages = (
        (128, 64, 8, 3) if fits else (64, 32, 4, 1 if q.dtype == torch.float32 else 2)
    )
    block_m = min(block_m, max(next_power_of_2(max_seqlen_q), 16))
    _mla_expanded_kernel[((tokens // block_m + batch) * heads,)](
        q, kv, k_rope, out, cu_seqlens_q, starts, seq_lens, *q.stride()[:2], *kv.stride()[:2], k_rope.stride(0),
        *out.stride()[:2], batch, heads, scale * LOG2_E, N=nope, P=rope, V=value,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=sizes[0],
        BLOCK_P=sizes[1], BLOCK_V=sizes[2], num_warps=warps if block_m >= 64 else 4, num_stages=stages,
    )  # fmt: skip
    return out


def plan(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor) -> dense.Plan:
    """Return how the kernel of attention_dense computes this op: queries of two warpgroups, tiles of keys that fit."""
    rope, nope = k_rope.shape[1], q.shape[2] - k_rope.shape[1]
    value = kv.shape[2] - nope
    keys = 128 if nope + rope <= 192 and value <= 128 else 64
    return dense.Plan(2, keys, 2, q.dtype == torch.bfloat16, nope, rope, value)


def supports_cuda(
    q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, cu_seqlens_q: torch.Tensor, starts: torch.Tensor,
    seq_lens: torch.Tensor, max_seqlen_q: int, scale: float, padded: bool = True,
) -> str | None:  # fmt: skip
    """Return why csrc/attention_dense.cu does not compute this call, None if it does."""
    if (reason := no_hopper(dense.SOURCE, q.device)) is not None:
        return reason
    _check(q, kv, k_rope)
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == kv.dtype == k_rope.dtype:
        return f"dtypes {q.dtype}, {kv.dtype}, {k_rope.dtype} are not all float16 or all bfloat16"
    p = plan(q, kv, k_rope)
    if (
        p.channels % 64
        or p.rope % 64
        or p.value % 64
        or max(p.channels + p.rope, p.value) > 256
        or not scale > 0
    ):
        return (
            f"{p.channels} + {p.rope} and {p.value} channels are no multiples of 64 up to 256, or scale {scale} is"
            " not positive"
        )
    if any(t.dtype != torch.int32 or not t.is_contiguous() for t in (cu_seqlens_q, starts, seq_lens)):
        return "cu_seqlens_q, starts and seq_lens must be contiguous int32"
    for name, t in (("q", q), ("kv", kv), ("k_rope", k_rope)):
        if t.data_ptr() % 16 or t.stride(-1) != 1 or any(s % 8 or not s for s in t.stride()[:-1]):
            return (
                f"{name} has strides {tuple(t.stride())}: its rows must be contiguous and start at 16 bytes"
            )
    return None


def _cuda(
    q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, cu_seqlens_q: torch.Tensor, starts: torch.Tensor,
    seq_lens: torch.Tensor, max_seqlen_q: int, scale: float, padded: bool = True,
) -> torch.Tensor:  # fmt: skip
    p, (tokens, heads), batch = plan(q, kv, k_rope), q.shape[:2], len(seq_lens)
    out = (torch.zeros if padded else torch.empty)((tokens, heads, p.value), dtype=q.dtype, device=q.device)
    if batch == 0 or max_seqlen_q == 0 or out.numel() == 0 or len(kv) == 0:
        return out.zero_()
    blocks = tokens // (64 * p.groups) + batch
    kv, k_rope = kv[None], k_rope[None, :, None]
    maps = [
        dense.tensor_map(t, rows)
        for t, rows in (
            (q[None], 64 * p.groups), (kv[..., : p.channels], p.keys), (kv[..., p.channels :], p.keys), (k_rope, p.keys)
        )
    ]  # fmt: skip
    given = (
        *maps[:3], out.data_ptr(), 0, 0, heads, 1, blocks, 0, scale * LOG2_E, maps[3], cu_seqlens_q.data_ptr(),
        starts.data_ptr(), seq_lens.data_ptr(), batch,
    )  # fmt: skip
    early = overlaps(q.device) and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(q.device).cuda_stream
    dense.kernel_for(q.device, p).launch(blocks * heads, p.threads, stream, given, overlap=early)
    return out


def _fake(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], kv.shape[2] + k_rope.shape[1] - q.shape[2])


mla_expanded = define(
    "mla_expanded(Tensor q, Tensor kv, Tensor k_rope, Tensor cu_seqlens_q, Tensor starts, Tensor seq_lens,"
    " SymInt max_seqlen_q, float scale, bool padded=True) -> Tensor",
    fake=_fake,
    providers=(
        Provider("cuda", _cuda, supports=supports_cuda),
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Leave unused rows between the sequences, as after a gather of their blocks."""
    d, device = call.sizes, call.device
    lens = torch.tensor(d["seq_lens"], dtype=torch.int64, device=device)
    gap = (d["rows"] - sum(d["seq_lens"])) // max(len(lens), 1)
    firsts = torch.tensor([0, *d["q_lens"]], device=device).cumsum(0)
    starts = (lens + gap).cumsum(0) - lens - gap
    return {"cu_seqlens_q": firsts.int(), "starts": starts.int(), "seq_lens": lens.int()}


def _case(
    name: str, q_lens: list[int], seq_lens: list[int], tag: str, dtype: str = "bfloat16", **dims: Any
) -> Case:
    sizes = {"heads": 16, "nope": 128, "rope": 64, "value": 128}
    return Case(name, {"q_lens": q_lens, "seq_lens": seq_lens, **sizes, **dims}, dtype, tags=(tag,))


def _draw(case: Case, rng: random.Random) -> dict[str, Any]:
    d = case.dims
    like = {**d, "kv_heads": d["heads"], "head_size": d["value"], "block_size": 16}
    drawn = cases.draw_batch(Case(case.name, like, case.dtype), rng)
    found = {name: n for name, n in drawn.items() if name in (*d, "rows")}
    sizes = {name: near_size(d[name], rng) for name in ("nope", "rope", "value")}
    return {**found, "heads": near(d["heads"], rng), **sizes, **({"rows": None} if "rows" in d else {})}


def _vary(case: Case, rng: random.Random) -> Case:
    return varied(case, lambda: _draw(case, rng), SPEC.bytes_moved, SPEC.flops)


_SMALL: dict[str, Any] = {"heads": 3, "nope": 24, "rope": 16, "value": 20}
SPEC = OpSpec(
    name="mla_expanded",
    level=1,
    reference=reference,
    op=mla_expanded,
    cases=(
        _case("prefill_8k", [1024] * 8, [1024] * 8, "model"),
        _case("chunked", [2048, 512], [8192, 4096], "model", heads=128),
        _case("one", [1], [1], "odd", "float32", heads=1, nope=1, rope=1, value=1),
        _case("odd", [5, 1, 9], [5, 17, 31], "odd", **_SMALL),
        _case("half", [3, 70], [40, 170], "odd", "float16", heads=2),
        _case("padding", [5, 1], [5, 17], "odd", "float32", padding=3, **_SMALL),
        _case("empty_sequence", [4, 0, 2], [4, 0, 19], "odd", **_SMALL),
        _case("long", [2, 70], [130, 70], "odd", "float32", **_SMALL),
        _case("large_value", [9, 20], [9, 33], "odd", heads=2, nope=48, rope=16, value=96),
    ),
    arguments=(
        Tensor("q", "tokens heads nope+rope", bytes="attended * heads * (nope + rope) * itemsize(dtype)"),
        Tensor("kv", "rows heads nope+value", bytes="keys_read * heads * (nope + value) * itemsize(dtype)"),
        Tensor("k_rope", "rows rope", bytes="keys_read * rope * itemsize(dtype)"),
        Tensor("cu_seqlens_q", "sequences+1", "int32", bytes="0"),
        Tensor("starts", "sequences", "int32", bytes="0"),
        Tensor("seq_lens", "sequences", "int32", bytes="0"),
        Scalar("max_seqlen_q"),
        Scalar("scale"),
        Scalar("padded", value="padding > 0"),
    ),
    outputs=(Tensor("out", "tokens heads value", bytes="attended * heads * value * itemsize(dtype)"),),
    axes={
        **{name: cases.AXES[name] for name in ("seq_lens", "heads", "sequences", "pairs", "keys_read")},
        **cases.RAGGED,
        "rows": Axis(lambda s: sum(n + 5 for n in s["seq_lens"]), stated=True),
        "nope": Axis.width(), "rope": Axis.width(), "value": Axis.width(),
        "scale": Axis(Expr("(nope + rope) ** -0.5")),
    },
    values=_values,
    flops="2 * pairs * heads * (nope + rope + value)",
    vary=_vary,
    activations=("kv",),  # the result is not linear in keys; values dominate its size
    contained="q",
    tolerance=cases.TOLERANCE,
)  # fmt: skip
