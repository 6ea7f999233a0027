"""Multi-head latent attention to chosen keys: the sparse attention (DSA) of DeepSeek-V3.2; see mla_prefill."""

from __future__ import annotations

import random
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import near, varied
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import cases
from fastkernels.overrides.attention.paged_cache import take_blocks
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, overlap
from fastkernels.overrides.kit.softmax import weights_of
from fastkernels.overrides.latent_attention import mla_cases, mla_decode_cuda, mla_triton, sparse_cases

MOST_GATHERED = 1 << 26  # numbers of keys that the reference has in memory at a time
QUERIES = 512  # of prompts, in one call of the kernel for decodes


def reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    head_size_v: int,
    k_scale: float = 1.0,
) -> torch.Tensor:
    """q: [T, H, R + P]; kv_cache: [blocks, block_size, R + P]; indices: [T, K] int32; cu_seqlens_q: [B + 1] int32.

    indices has the positions of the keys that a query attends to, in its own sequence, without gaps; then -1, which is
    no key. Query i of a sequence's n sees seq_len - n + i + 1 keys, and no more of its indices are read. seq_lens: [B]
    int32; block_table: [B, max_blocks]. The rest as in mla_decode. Returns [T, H, R] in q's dtype; a query without
    keys, or past cu_seqlens_q[B] (padding), gives zeros.
    """
    mla_cases.check("mla_sparse", q, kv_cache, head_size_v)
    acc = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:2], head_size_v, dtype=q.dtype, device=q.device)
    row = sparse_cases.sequence_of(cu_seqlens_q, len(q))
    inside, row = row < len(block_table), row.clamp(max=len(block_table) - 1)
    seen = seq_lens[row] - cu_seqlens_q[1:][row] + torch.arange(1, len(q) + 1, device=q.device)
    columns = torch.arange(indices.shape[1], device=q.device)
    own = (indices >= 0) & inside[:, None] & (columns < seen[:, None])
    at = torch.where(own, indices, 0).long()
    size, flat = kv_cache.shape[1], kv_cache.flatten(0, 1)
    step = max(1, MOST_GATHERED // max(indices.shape[1] * kv_cache.shape[2], 1))
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        blocks = torch.where(own[some], block_table[row[some, None], at[some] // size], 0).long()
        keys = take_blocks(flat, blocks * size + at[some] % size).to(acc) * k_scale
        keys = keys.masked_fill(~own[some, :, None], 0)  # the cache may hold NaN where nothing was stored
        scores = torch.einsum("thd,tkd->thk", q[some].to(acc), keys) * scale
        weights = weights_of(scores.masked_fill(~own[some, None], float("-inf")))
        out[some] = torch.einsum("thk,tkr->thr", weights, keys[..., :head_size_v]).to(q.dtype)
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _sparse_kernel(
    q_ptr, kv_ptr, index_ptr, out_ptr, part_ptr, lse_ptr, cu_ptr, len_ptr, table_ptr, q_stride_t, q_stride_h,
    kv_stride_b, kv_stride_s, table_stride, block_size, heads, R, P, K, scale, k_scale, TILES: tl.constexpr,
    PRECISION: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (query and block of heads, sequence, split of the chosen keys).
    seq, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.load(cu_ptr + seq)
    n_q = tl.load(cu_ptr + seq + 1) - start
    i = tl.program_id(0) // TILES
    if i < n_q:
        token = (start + i).to(tl.int64)
        head = (tl.program_id(0) % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
        channel, rope = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
        row_mask = (head < heads)[:, None]
        q_at = q_ptr + token * q_stride_t + head[:, None] * q_stride_h
        q = tl.load(q_at + channel[None, :], mask=row_mask & (channel < R)[None, :], other=0.0)
        q_rope = tl.load(q_at + R + rope[None, :], mask=row_mask & (rope < P)[None, :], other=0.0)
        used = tl.minimum(tl.load(len_ptr + seq) - n_q + i + 1, K)
        per_split = tl.cdiv(tl.cdiv(used, BLOCK_N), SPLITS) * BLOCK_N
        low = split * per_split
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for begin in range(low, tl.minimum(low + per_split, used), BLOCK_N):
            cols = begin + tl.arange(0, BLOCK_N)
            key = tl.load(index_ptr + token * K + cols, mask=cols < used, other=-1)
            inside = key >= 0
            key = tl.where(inside, key, 0)
            page = tl.load(table_ptr + seq * table_stride + key // block_size, mask=inside, other=0)
            at = (page.to(tl.int64) * kv_stride_b + (key % block_size).to(tl.int64) * kv_stride_s)[:, None]
            c_mask = inside[:, None] & (channel < R)[None, :]
            c = tl.load(kv_ptr + at + channel[None, :], mask=c_mask, other=0.0).to(q.dtype)
            p_mask = inside[:, None] & (rope < P)[None, :]
            k_rope = tl.load(kv_ptr + at + R + rope[None, :], mask=p_mask, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(c), input_precision=PRECISION)
            scores += tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION)
            scores = tl.where(inside[None, :], scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # Before the first key, -inf - -inf would be NaN
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp(scores - base[:, None])
            decay = tl.exp(top - base)
            total = total * decay + tl.sum(p, 1)
            acc = acc * decay[:, None] + tl.dot(p.to(c.dtype), c, input_precision=PRECISION)
            top = new_top
        acc = acc * k_scale / tl.where(total == 0.0, 1.0, total)[:, None]
        row = token * heads + head[:, None]
        mask = row_mask & (channel < R)[None, :]
        if SPLITS == 1:
            tl.store(out_ptr + row * R + channel[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            row = row * SPLITS + split
            lse = tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
            tl.store(lse_ptr + row, lse[:, None], mask=row_mask)
            tl.store(part_ptr + row * R + channel[None, :], acc, mask=mask)


def _triton(
    q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_q: int, scale: float, head_size_v: int,
    k_scale: float = 1.0, splits: int | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    mla_cases.check("mla_sparse", q, kv_cache, head_size_v)
    out = mla_cases.memory("mla_sparse", q, head_size_v, out)
    (tokens, heads, size), batch, topk = q.shape, len(cu_seqlens_q) - 1, indices.shape[1]
    decodes = max_seqlen_q == 1 and batch == tokens
    if not decodes:
        out.zero_()  # for padding
    if tokens == 0 or batch == 0 or max_seqlen_q == 0:
        return out
    block_m, block_n = 16, 16 if q.dtype == torch.float32 else 32  # as in mla_triton.attend
    tiles = cdiv(heads, block_m)
    splits = 1 if not decodes else splits or mla_triton.splits_for(q.device, batch * tiles, topk)
    part, lse = out, out  # unused with one split
    if splits > 1:
        part = torch.empty(tokens, heads, splits, head_size_v, dtype=torch.float32, device=q.device)
        lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=q.device)
    rope = size - head_size_v
    _sparse_kernel[(max_seqlen_q * tiles, batch, splits)](
        q, kv_cache, indices, out, part, lse, cu_seqlens_q, seq_lens, block_table, *q.stride()[:2],
        *kv_cache.stride()[:2], block_table.stride(0), kv_cache.shape[1], heads, head_size_v, rope, topk,
        scale * k_scale, k_scale, TILES=tiles, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", SPLITS=splits,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=max(next_power_of_2(head_size_v), 16),
        BLOCK_P=max(next_power_of_2(max(rope, 1)), 16), num_warps=4, num_stages=2, **overlap(q.device, early=False),
    )  # fmt: skip
    if splits > 1:
        mla_triton.combine(part, lse, out)
    return out


def _cuda(
    q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_q: int, scale: float, head_size_v: int,
    k_scale: float = 1.0, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel for decodes: each query of a prompt is a sequence of its own, which ends with the query."""
    rest = 1, scale, head_size_v, k_scale
    if _decodes(q, block_table, max_seqlen_q):
        return mla_decode_cuda.decode_sparse(
            q, kv_cache, indices, cu_seqlens_q, seq_lens, block_table, *rest, out=out
        )
    out = mla_cases.memory("mla_sparse", q, head_size_v, out)
    row = sparse_cases.sequence_of(cu_seqlens_q, len(q))
    inside, row = row < len(block_table), row.clamp(max=len(block_table) - 1)
    seen = seq_lens[row] - cu_seqlens_q[1:][row] + torch.arange(1, len(q) + 1, device=q.device)
    seen = torch.where(inside, seen, 0).int()
    for first in range(0, len(q), QUERIES):
        some = slice(first, first + QUERIES)
        of_queries = indices[some], cu_seqlens_q, seen[some], block_table[row[some]]
        mla_decode_cuda.decode_sparse(q[some], kv_cache, *of_queries, *rest, out=out[some])
    return out


def _decodes(q: torch.Tensor, block_table: torch.Tensor, max_seqlen_q: int) -> bool:
    return max_seqlen_q == 1 and len(q) == len(block_table)


def _supports_cuda(
    q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_q: int, scale: float, head_size_v: int,
    k_scale: float = 1.0,
) -> str | None:  # fmt: skip
    some = slice(None if _decodes(q, block_table, max_seqlen_q) else 1)
    of_queries = cu_seqlens_q, seq_lens[some], block_table[some], 1, scale, head_size_v, k_scale
    if not indices.is_contiguous():
        return f"indices have strides {tuple(indices.stride())}: they must be contiguous"
    return mla_decode_cuda.supports_sparse(q[some], kv_cache, indices[some], *of_queries)


def _supports_triton(q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, *_: Any) -> str | None:
    if not indices.is_contiguous():
        return f"indices have strides {tuple(indices.stride())}: they must be contiguous"
    return mla_triton.supports(q, kv_cache)


mla_sparse = define(
    "mla_sparse(Tensor q, Tensor kv_cache, Tensor indices, Tensor cu_seqlens_q, Tensor seq_lens,"
    " Tensor block_table, SymInt max_seqlen_q, float scale, int head_size_v, float k_scale=1.0) -> Tensor",
    fake=lambda q, kv_cache, indices, cu, lens, table, n, scale, head_size_v, *_: q.new_empty(
        *q.shape[:2], head_size_v
    ),
    providers=(
        Provider("cuda", _cuda, supports=_supports_cuda, out=True),
        Provider("triton", _triton, supports=_supports_triton, out=True),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Each query attends to its own key and to random ones of the others that it sees."""
    d = call.sizes
    seq_lens, table = cases.block_tables(d, call.device, call.generator)
    _, _, starts = cases.ragged(d, table)
    seen = torch.tensor([*sparse_cases.seen_by(d), *[0] * d["padding"]], device=call.device)
    indices = torch.full((len(seen), d["topk"]), -1, dtype=torch.int32, device=call.device)
    longest = max(d["seq_lens"], default=0)
    step, at = max(1, (1 << 24) // max(longest, 1)), torch.arange(longest, device=call.device)
    for first in range(0, len(seen), step):
        some = slice(first, first + step)
        drawn = call.rand(len(seen[some]), longest)
        drawn[at == seen[some, None] - 1] = 2.0
        drawn[at >= seen[some, None]] = -1.0
        chosen = drawn.topk(min(d["topk"], longest), dim=-1)
        kept = torch.where(chosen.values < 0, longest, chosen.indices).sort(dim=-1).values
        indices[some, : kept.shape[1]] = torch.where(kept < longest, kept, -1).to(torch.int32)
    return {"cu_seqlens_q": starts, "seq_lens": seq_lens, "block_table": table, "indices": indices}


def _case(
    name: str, q_lens: list[int], seq_lens: list[int], tag: str, dtype: str = "bfloat16", **dims: Any
) -> Case:
    given = {"q_lens": q_lens, "seq_lens": seq_lens, **mla_cases.DEEPSEEK, "topk": 2048, **dims}
    return Case(name, given, dtype, 61 if max(q_lens, default=0) == 1 and tag == "model" else 1, tags=(tag,))


def _vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        return {**mla_cases.draw_batch(case, rng), "topk": near(case.dims["topk"], rng)}

    return varied(case, draw, SPEC.bytes_moved, SPEC.flops)


def _none_chosen(args: list[Any]) -> None:
    args[2][::2] = -1


_AXES = {**mla_cases.AXES, **cases.RAGGED}
_ATTENDED = "attended * heads * ({}) * itemsize(queries)"
_SMALL = {**mla_cases.SMALL, "topk": 7}
SPEC = OpSpec(
    name="mla_sparse",
    level=1,
    reference=reference,
    op=mla_sparse,
    cases=(
        _case("decode_1", [1], [16384], "model"),
        _case("decode_32", [1] * 32, [4096] * 32, "model"),
        _case("tp_8", [1] * 32, [8192] * 32, "model", heads=16),
        _case("prefill_4k", [2048], [4096], "model", heads=16),
        _case("one", [1], [1], "odd", "float32", heads=1, latent=1, rope=1, block_size=1, topk=1),
        _case("odd", [5, 1, 9], [5, 17, 31], "odd", **_SMALL),
        _case("half", [3, 7], [40, 7], "odd", "float16", heads=5, latent=40, rope=6, block_size=5, topk=11),
        _case("padding", [5, 1], [5, 17], "odd", "float32", padding=3, **_SMALL),
        _case("empty_sequence", [4, 0, 2], [4, 0, 19], "odd", "float32", **_SMALL),
        _case("many_heads", [1, 1], [90, 40], "odd", "float32", **{**_SMALL, "heads": 19, "topk": 70}),
        _case("two_splits", [1, 1], [700, 90], "odd", "float32", **{**_SMALL, "topk": 600}),
        _case("fp8", [5, 1, 9], [5, 17, 70], "odd", "float8_e4m3fn", k_scale=0.5, **_SMALL),
    ),
    arguments=(
        Tensor("q", "tokens heads latent+rope", "queries", bytes=_ATTENDED.format("latent + rope")),
        Tensor(
            "kv_cache",
            mla_cases.CACHE.axes,
            bytes="min(keys_read, chosen) * (latent + rope) * itemsize(dtype)",
        ),
        Tensor("indices", "tokens topk", "int32"),
        Tensor("cu_seqlens_q", "sequences+1", "int32", bytes="0"),
        cases.SEQ_LENS,
        cases.BLOCK_TABLE,
        Scalar("max_seqlen_q"),
        *mla_cases.SCALARS,
    ),
    outputs=(Tensor("out", "tokens heads latent", "queries", bytes=_ATTENDED.format("latent")),),
    axes={
        **{name: axis for name, axis in _AXES.items() if name != "max_seqlen_k"},
        "topk": Axis.count(),
        "chosen": Axis(sparse_cases.chosen, varies=True),
    },
    values=_values,
    flops="2 * chosen * heads * (2 * latent + rope)",
    vary=_vary,
    contained="q",
    extremes={**mla_cases.EXTREMES, "none_chosen": _none_chosen},
    tolerance=cases.TOLERANCE,
)
