"""Causal attention of several sequences over a paged KV cache (FlashAttention: Dao, arXiv 2307.08691)."""

from __future__ import annotations

import random
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import varied
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import cases, fa3, flashinfer
from fastkernels.overrides.attention.paged_cache import (
    check,
    memory,
    no_alibi,
    no_sinks,
    supports_triton,
    take_blocks,
)
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.softmax import weights_of

TREE_BITS = 64  # places before a query that its number in a tree tells about


def reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    padded: bool = True,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [T, Hq, D]; caches: [blocks, block_size, Hkv, D]; cu_seqlens_q: [B + 1] and seq_lens: [B] int32.

    A sequence's queries are its last tokens: query i of n sees keys 0 .. seq_len - n + i, and with window_left >= 0
    only the last window_left + 1 of those. block_table: [B, max_blocks]; entries past seq_len are not read.
    softcap > 0: logits become softcap * tanh(logits / softcap). With caches of float8_e4m3fn, keys are
    key_cache * k_scale and values value_cache * v_scale. Returns [T, Hq, D] in q's dtype; a query without keys, or past
    cu_seqlens_q[B] (padding), gives zeros. With padded=False padding rows are undefined, which saves a launch that
    zeroes the output. sinks: [Hq], attention sinks (GPT-OSS): the logit of one more key of each head, whose value is 0.
    alibi_slopes: [Hq] float32 (ALiBi, arXiv 2108.12409): times (key's position - query's) is added to the logits.
    tree: [T] int64, of drafts that see their ancestors only: bit d of a query's number says whether it sees the key d
    places before its own. Keys that are 64 or more places before it are always seen.
    """
    check("attention_prefill", q, key_cache, value_cache)
    acc = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    block_size, group = key_cache.shape[1], q.shape[1] // key_cache.shape[2]
    for i, n_keys in enumerate(lengths):
        rows, blocks = slice(starts[i], starts[i + 1]), block_table[i, : -(-n_keys // block_size)].long()
        n = starts[i + 1] - starts[i]
        if n == 0 or n_keys == 0:
            continue
        keys = take_blocks(key_cache, blocks).flatten(0, 1)[:n_keys].to(acc) * k_scale
        values = take_blocks(value_cache, blocks).flatten(0, 1)[:n_keys].to(acc) * v_scale
        grouped = q[rows].to(acc).view(n, -1, group, q.shape[-1])  # [n, Hkv, Hq / Hkv, D]
        scores = torch.einsum("nhgd,khd->hgnk", grouped, keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        last = torch.arange(n_keys - n, n_keys, device=q.device)[:, None]
        at = torch.arange(n_keys, device=q.device)[None, :]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(acc).view(-1, group, 1, 1) * (at - last)
        seen = at <= last
        if window_left >= 0:
            seen &= at >= last - window_left
        if tree is not None:
            back = last - at
            seen &= (back >= TREE_BITS) | (tree[rows, None] >> back.clamp(0, TREE_BITS - 1) & 1).bool()
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.to(acc).view(-1, group, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
        else:
            weights = weights_of(scores)
        out[rows] = torch.einsum("hgnk,khd->nhgd", weights, values).reshape(n, *q.shape[1:]).to(q.dtype)
    return out


@triton.jit(do_not_specialize=["table_stride", "batch"])
def _attention_prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_ptr, len_ptr, table_ptr, q_stride_t, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, out_stride_t, out_stride_h, table_stride,
    sink_ptr, slope_ptr, tree_ptr, batch, kv_heads, D, scale, v_scale, window_left, softcap,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program per (block of queries, key head). Its BLOCK_M rows are BLOCK_Q queries of the GROUP heads that share
    # the keys. Each key is looked up in the block table on its own, so that any block size works.
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    # Late queries see the most keys: they go first.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // kv_heads
    # The grid depends on shapes only, so that a CUDA graph serves any lengths: blocks of sequence i begin at number
    # i + (queries before it) // BLOCK_Q.
    before = tl.load(cu_ptr)
    seq, most = batch * 0, batch - 1
    while seq < most:
        middle = (seq + most + 1) // 2
        is_past = (tl.load(cu_ptr + middle) - before) // BLOCK_Q + middle > block
        seq, most = tl.where(is_past, seq, middle), tl.where(is_past, middle - 1, most)
    start = tl.load(cu_ptr + seq)
    n_q = tl.load(cu_ptr + seq + 1) - start
    n_k = tl.load(len_ptr + seq)
    first = (block - seq - (start - before) // BLOCK_Q) * BLOCK_Q
    if first < n_q:
        at = tl.arange(0, BLOCK_M)
        rows, heads = first + at // GROUP, kv_head * GROUP + at % GROUP
        dims = tl.arange(0, BLOCK_D)
        q_mask = ((rows < n_q) & (at < BLOCK_Q * GROUP))[:, None] & (dims < D)[None, :]
        tokens = (start + rows).to(tl.int64)[:, None]
        q_at = q_ptr + tokens * q_stride_t + heads[:, None] * q_stride_h + dims[None, :]
        q = tl.load(q_at, mask=q_mask, other=0.0)
        last = n_k - n_q + rows
        if TREE:
            bits = tl.load(tree_ptr + start + rows, mask=rows < n_q, other=-1)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        low = 0
        if WINDOW:
            low = tl.maximum(n_k - n_q + first - window_left, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(n_k - n_q + first + BLOCK_Q, n_k)
        for begin in range(low, high, BLOCK_N):
            cols = begin + tl.arange(0, BLOCK_N)
            inside = cols < n_k
            page = tl.load(
                table_ptr + seq.to(tl.int64) * table_stride + cols // BLOCK_SIZE, mask=inside, other=0
            )
            page, slot = page.to(tl.int64), (cols % BLOCK_SIZE).to(tl.int64)
            kv_mask = inside[:, None] & (dims < D)[None, :]
            k_at = (page * k_stride_b + slot * k_stride_s)[:, None] + kv_head * k_stride_h + dims[None, :]
            v_at = (page * v_stride_b + slot * v_stride_s)[:, None] + kv_head * v_stride_h + dims[None, :]
            k = tl.load(k_ptr + k_at, mask=kv_mask, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
            if ALIBI:
                slopes = tl.load(slope_ptr + heads)
                scores += slopes[:, None] * (cols[None, :] - last[:, None]).to(tl.float32)
            seen = (cols[None, :] <= last[:, None]) & inside[None, :]
            if WINDOW:
                seen = seen & (cols[None, :] >= last[:, None] - window_left)
            if TREE:
                # A shift of 63 gives the sign, which is set: a tree has fewer nodes.
                back = tl.minimum(tl.maximum(last[:, None] - cols[None, :], 0), 63).to(tl.int64)
                seen = seen & (((bits[:, None] >> back) & 1) != 0)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # Before the first key, -inf - -inf would be NaN
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp(scores - base[:, None])
            decay = tl.exp(top - base)
            v = tl.load(v_ptr + v_at, mask=kv_mask, other=0.0).to(q.dtype)
            total = total * decay + tl.sum(p, 1)
            acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = new_top
        if SINKS:
            sink = tl.load(sink_ptr + heads).to(tl.float32)
            new_top = tl.maximum(top, sink)
            decay = tl.exp(top - new_top)
            total = total * decay + tl.exp(sink - new_top)
            acc = acc * decay[:, None]
        acc = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = out_ptr + tokens * out_stride_t + heads[:, None] * out_stride_h + dims[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def _without_padding(q: torch.Tensor, out: torch.Tensor | None, padded: bool) -> torch.Tensor:
    """Return `out`, or new memory; all zeros if there may be padding rows, which belong to no sequence."""
    out = memory("attention_prefill", q, out)
    return out.zero_() if padded else out


def _tile(q: torch.Tensor, block_d: int, rows: int) -> tuple[int, int, int]:
    """Return (BLOCK_M, BLOCK_N, num_warps) for a longest sequence with so many rows.

    Tiles of heads over 256 fill the shared memory: 192 KB on Hopper, 98 KB elsewhere. With 4 warps they would spill.
    """
    single = q.dtype == torch.float32
    if rows <= 16:
        return 16, 32 if block_d >= 256 or single else 64, 8 if block_d > 256 else 4
    if block_d > 256:
        large = q.is_cuda and not single and torch.cuda.get_device_capability(q.device)[0] == 9
        return 64 if large else 32, 16 if single else 32, 8
    if block_d == 256 or single:
        return 64, 32, 4
    return 128, 64, 8


def _triton(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    padded: bool = True,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    check("attention_prefill", q, key_cache, value_cache)
    out = _without_padding(q, out, padded)
    batch, block_d = seq_lens.shape[0], max(next_power_of_2(q.shape[2]), 16)
    if batch == 0 or max_seqlen_q == 0:
        return out
    kv_heads = key_cache.shape[2]
    group = q.shape[1] // kv_heads
    block_m, block_n, num_warps = _tile(q, block_d, max_seqlen_q * group)
    block_m = max(block_m, next_power_of_2(group))
    _attention_prefill_kernel[((q.shape[0] // (block_m // group) + batch) * kv_heads,)](
        q, key_cache, value_cache, out, cu_seqlens_q, seq_lens, block_table, *q.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], *out.stride()[:2], block_table.stride(0),
        sinks, alibi_slopes, tree, batch, kv_heads, q.shape[2], scale * k_scale, v_scale, window_left, softcap,
        BLOCK_SIZE=key_cache.shape[1], GROUP=group, SINKS=sinks is not None, ALIBI=alibi_slopes is not None,
        TREE=tree is not None, WINDOW=window_left >= 0, SOFTCAP=softcap > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    return out


def _fa3_prefill(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, scale: float,
    window_left: int = -1, softcap: float = 0.0, k_scale: float = 1.0, v_scale: float = 1.0, padded: bool = True,
    sinks: torch.Tensor | None = None, alibi_slopes: None = None, tree: None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return fa3.attend(
        q, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k, scale,
        window_left, softcap, k_scale, v_scale, _without_padding(q, out, padded), sinks,
    )  # fmt: skip


ALIBI = 15  # position of the argument alibi_slopes
attention_prefill = define(
    "attention_prefill(Tensor q, Tensor key_cache, Tensor value_cache, Tensor cu_seqlens_q, Tensor seq_lens,"
    " Tensor block_table, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int window_left=-1,"
    " float softcap=0.0, float k_scale=1.0, float v_scale=1.0, bool padded=True, Tensor? sinks=None,"
    " Tensor? alibi_slopes=None, Tensor? tree=None) -> Tensor",
    fake=lambda q, *args, **kwargs: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    providers=(
        Provider("fa3", _fa3_prefill, module=fa3.MODULES, supports=no_alibi(fa3.supports, ALIBI), out=True),
        Provider("triton", _triton, supports=supports_triton, out=True),
        Provider(
            "flashinfer",
            flashinfer.prefill,
            module="flashinfer",
            supports=no_alibi(no_sinks(flashinfer.supports_prefill), ALIBI),
        ),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, q_lens: list[int], seq_lens: list[int], tag: str, dtype: str = "bfloat16", **dims: Any
) -> Case:
    shape = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16, **dims}
    return Case(name, {"q_lens": q_lens, "seq_lens": seq_lens, **shape}, dtype, tags=(tag,))


_SMALL: dict[str, Any] = {"heads": 3, "kv_heads": 1, "head_size": 64}
_ATTENDED = "attended * heads * head_size * itemsize(queries)"


def _vary(case: Case, rng: random.Random) -> Case:
    return varied(case, lambda: cases.draw_batch(case, rng), SPEC.bytes_moved, SPEC.flops)


SPEC = OpSpec(
    name="attention_prefill",
    level=1,
    reference=reference,
    op=attention_prefill,
    cases=(
        _case("prefill_8k", [8192], [8192], "model"),
        _case("prefill_32x256", [256] * 32, [256] * 32, "model"),
        _case("chunked", [2048, 512], [8192, 4096], "model"),
        _case(
            "sinks_2k", [2048], [2048], "model", sinks=True, heads=64, kv_heads=8, head_size=64
        ),  # GPT-OSS-20b
        _case("one", [1], [1], "odd", "float32", heads=1, kv_heads=1, head_size=2, block_size=1),
        _case("smollm2", [5, 1, 9], [5, 17, 31], "odd", **_SMALL),
        _case("head_96", [3, 7], [40, 7], "odd", "float16", heads=4, kv_heads=2, head_size=96, block_size=5),
        _case("window", [9], [70], "odd", "float32", window_left=11, block_size=32, **_SMALL),
        _case("softcap", [2, 6], [2, 33], "odd", "float32", softcap=2.0, **_SMALL),
        _case("padding", [5, 1], [5, 17], "odd", padding=3, **_SMALL),
        _case("empty_sequence", [4, 0, 2], [4, 0, 19], "odd", **_SMALL),
        _case("sinks", [5, 1, 9], [5, 17, 31], "odd", "float32", sinks=True, window_left=11, **_SMALL),
        _case("alibi", [5, 1, 9], [5, 17, 31], "odd", "float32", alibi=True, **_SMALL),
        _case(
            "alibi_2k", [2048], [2048], "model", alibi=True, heads=32, kv_heads=32, head_size=128
        ),  # MPT-7B
        _case("tree", [5, 1, 9], [5, 17, 90], "odd", "float32", tree=True, **_SMALL),
        _case("tree_32", [9] * 32, [1024] * 32, "model", tree=True),
        _case("fp8", [5, 1, 9], [5, 17, 70], "odd", "float8_e4m3fn", scales=(0.5, 0.75), **_SMALL),
    ),
    arguments=(
        Tensor("q", "tokens heads head_size", "queries", bytes=_ATTENDED),
        *cases.CACHE,
        Tensor("cu_seqlens_q", "sequences+1", "int32", bytes="0"),
        cases.SEQ_LENS,
        cases.BLOCK_TABLE,
        Scalar("max_seqlen_q"),
        Scalar("max_seqlen_k"),
        *cases.SCALARS,
        Scalar("padded", value="padding > 0"),
        cases.SINKS,
        cases.ALIBI,
        cases.TREE,
    ),
    outputs=(Tensor("out", "tokens heads head_size", "queries", bytes=_ATTENDED),),
    axes={**cases.AXES, **cases.RAGGED},
    values=cases.values,
    flops=cases.FLOPS,
    vary=_vary,
    extremes={**cases.EXTREMES, "nothing_cached": lambda args: args[4].copy_(args[3].diff())},
    activations=("value_cache",),  # the result is linear in the values
    contained="q",
    tolerance=cases.TOLERANCE,
    baseline="fa3",
)
