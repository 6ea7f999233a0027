"""Attention of one query per sequence over a paged KV cache, split along the keys (Flash-Decoding, Dao et al. 2023)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Scalar, Tensor
from fastkernels.core.dispatch import Key, Provider, define
from fastkernels.core.shapes import optional, unless
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import (
    attention_decode_cpp,
    attention_decode_cpu,
    attention_decode_cuda,
    attention_decode_split,
    cases,
    fa3,
    flashinfer,
)
from fastkernels.overrides.attention.paged_cache import (
    check,
    dtype_of,
    memory,
    no_alibi,
    no_sinks,
    supports_triton,
    take_blocks,
)
from fastkernels.overrides.attention.selection import propose_decode
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, overlap
from fastkernels.overrides.kit.softmax import weights_of


def reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [B, Hq, D], the last token of each sequence; caches: [blocks, block_size, Hkv, D]; seq_lens: [B] int32.

    block_table: [B, max_blocks]; entries past seq_len are not read. max_seqlen_k: at least the largest seq_len.
    The rest, sinks and alibi_slopes among it, as in attention_prefill. Returns [B, Hq, D] in q's dtype, bfloat16 for q
    in fp8 (whose scale is part of `scale`); zeros where seq_len is 0.
    """
    check("attention_decode", q, key_cache, value_cache)
    acc = torch.promote_types(dtype_of(q), torch.float32)
    block_size, kv_heads, d = key_cache.shape[1:]
    batch, n_blocks = q.shape[0], min(-(-max_seqlen_k // block_size), block_table.shape[1])
    at = torch.arange(n_blocks * block_size, device=q.device)
    seen = at < seq_lens[:, None]  # [B, K]
    blocks = torch.where(seen[:, ::block_size], block_table[:, :n_blocks], 0).long()
    if window_left >= 0:
        seen = seen & (at >= seq_lens[:, None] - 1 - window_left)
    # Past the end of a sequence the cache may hold NaN: scores are replaced there, and values have the weight 0.
    keys, values = (
        take_blocks(cache, blocks).view(batch, -1, kv_heads, d).to(acc) for cache in (key_cache, value_cache)
    )
    values = values.masked_fill(~seen[:, :, None, None], 0)
    if k_scale != 1 or v_scale != 1:
        keys, values = keys * k_scale, values * v_scale
    grouped = q.to(acc).view(batch, kv_heads, -1, d)
    scores = torch.einsum("bhgd,bkhd->bhgk", grouped, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(acc).view(1, kv_heads, -1, 1)
        scores = scores + slopes * (at - (seq_lens[:, None] - 1))[:, None, None]
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.to(acc).view(1, kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = weights_of(scores)
    return torch.einsum("bhgk,bkhd->bhgd", weights, values).reshape(q.shape).to(dtype_of(q))


ALIBI = 12  # position of the argument alibi_slopes
# Keys of the longer calls of a patch's measurement: at most, at least, and bytes that a call reads at most
LONGER, LONGER_LEAST, LONGER_BYTES = 131072, 8192, 1 << 30
MIN_SPLIT = 256  # keys: a smaller split costs more to combine than it saves


@triton.jit(do_not_specialize=["table_stride"])
def _attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, len_ptr, table_ptr, q_stride_b, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, table_stride,
    sink_ptr, slope_ptr, block_size, n_heads, group, D, scale, v_scale, window_left, softcap,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (sequence, key head, split): all query heads of the group share the keys that it reads.
    seq, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    n_k = tl.load(len_ptr + seq)
    first = 0
    if WINDOW:
        first = tl.maximum(n_k - 1 - window_left, 0) // BLOCK_N * BLOCK_N
    # SPLITS is for the longest sequence; a shorter one uses fewer, none of them under MIN_SPLIT.
    per_split = tl.maximum(tl.cdiv(tl.cdiv(n_k - first, BLOCK_N), SPLITS) * BLOCK_N, MIN_SPLIT)
    low = first + split * per_split
    high = tl.minimum(low + per_split, n_k)
    dims = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_G)
    heads = kv_head * group + rows
    q_mask = (rows < group)[:, None] & (dims < D)[None, :]
    q = tl.load(
        q_ptr + seq * q_stride_b + heads[:, None] * q_stride_h + dims[None, :], mask=q_mask, other=0.0
    )
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(low, high, BLOCK_N):
        cols = begin + tl.arange(0, BLOCK_N)
        inside = cols < high
        page = tl.load(table_ptr + seq * table_stride + cols // block_size, mask=inside, other=0).to(tl.int64)
        slot = (cols % block_size).to(tl.int64)
        kv_mask = inside[:, None] & (dims < D)[None, :]
        k_at = (page * k_stride_b + slot * k_stride_s)[:, None] + kv_head * k_stride_h + dims[None, :]
        v_at = (page * v_stride_b + slot * v_stride_s)[:, None] + kv_head * v_stride_h + dims[None, :]
        k = tl.load(k_ptr + k_at, mask=kv_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
        if ALIBI:
            slopes = tl.load(slope_ptr + heads, mask=rows < group, other=0.0)
            scores += slopes[:, None] * (cols - (n_k - 1)).to(tl.float32)[None, :]
        seen = inside
        if WINDOW:
            seen = seen & (cols >= n_k - 1 - window_left)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(scores - base[:, None])
        decay = tl.exp(top - base)
        v = tl.load(v_ptr + v_at, mask=kv_mask, other=0.0).to(q.dtype)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    if SINKS and SPLITS == 1:
        sink = tl.load(sink_ptr + heads, mask=rows < group, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, sink)
        decay = tl.exp(top - new_top)
        total = total * decay + tl.exp(sink - new_top)
        acc = acc * decay[:, None]
    acc = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    row = seq * n_heads + heads
    if SPLITS == 1:
        tl.store(out_ptr + row[:, None] * D + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse_ptr + row * SPLITS + split, lse, mask=rows < group)
        used = q_mask & (low < high)
        tl.store(part_ptr + (row * SPLITS + split)[:, None] * D + dims[None, :], acc, mask=used)


@triton.jit
def _combine_kernel(
    part_ptr, lse_ptr, out_ptr, sink_ptr, n_heads, D, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (sequence, query head): it weights the splits' results by their shares of the softmax.
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + row * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    if SINKS:  # a key without a value
        sink = tl.load(sink_ptr + row % n_heads).to(tl.float32)
        top = tl.maximum(top, sink)
    weight = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
    mask = (lse > float("-inf"))[:, None] & (dims < D)[None, :]  # splits without keys wrote only their lse
    part = tl.load(part_ptr + (row * SPLITS + splits)[:, None] * D + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(sink - top)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * D + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _splits(device: torch.device, programs: int, max_seqlen_k: int) -> int:
    """Return the most splits: two programs per SM, none under MIN_SPLIT, a power of two."""
    wanted = min(-(-2 * _multiprocessors(device) // programs), -(-max_seqlen_k // MIN_SPLIT), 64)
    return 1 << (max(wanted, 1).bit_length() - 1)


def _triton(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    check("attention_decode", q, key_cache, value_cache)
    batch, heads, d = q.shape
    if d > 256 and sinks is None and alibi_slopes is None and splits is None:
        layout = q, key_cache, value_cache, seq_lens, block_table
        if attention_decode_split.supports_split(*layout) is None:
            # It takes 0.45 to 0.83 of the time of the kernel here (head size 512, H100, 2026-11-27).
            return attention_decode_split.decode_split(
                *layout, max_seqlen_k, scale, window_left, softcap, k_scale, v_scale, out=out
            )
    kv_heads = key_cache.shape[2]
    out = memory("attention_decode", q, out)
    if batch == 0:
        return out
    splits = splits or _splits(q.device, batch * kv_heads, max_seqlen_k)
    part, lse = out, out  # unused with one split
    if splits > 1:
        part = torch.empty(batch, heads, splits, d, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    group, block_d = heads // kv_heads, max(next_power_of_2(d), 16)
    # float32 programs compute for long. Programs of an early launch pile up on the SMs that free up first: six on one
    # SM took 104 us, against 23 us without an early launch (H200).
    early = q.dtype != torch.float32
    _attention_decode_kernel[(batch, kv_heads, splits)](
        q, key_cache, value_cache, out, part, lse, seq_lens, block_table, *q.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], block_table.stride(0), sinks, alibi_slopes,
        key_cache.shape[1], heads, group, d, scale * k_scale, v_scale, window_left, softcap,
        SINKS=sinks is not None, ALIBI=alibi_slopes is not None, WINDOW=window_left >= 0, SOFTCAP=softcap > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", SPLITS=splits, MIN_SPLIT=MIN_SPLIT,
        BLOCK_G=max(next_power_of_2(group), 16), BLOCK_N=32 if block_d >= 256 else 64, BLOCK_D=block_d,
        num_warps=8 if block_d > 256 else 4, num_stages=2, **overlap(q.device, early=early),
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(batch * heads,)](
            part, lse, out, sinks, heads, d, SINKS=sinks is not None, SPLITS=splits,
            BLOCK_S=next_power_of_2(splits), BLOCK_D=block_d, num_warps=8 if block_d > 256 else 4,
            **overlap(q.device, early=early),
        )  # fmt: skip
    return out


_STARTS: dict[torch.device, torch.Tensor] = {}


def _starts(batch: int, device: torch.device) -> torch.Tensor:
    """Return the query starts of a decode, 0 .. batch, as int32: cached, to save a launch per layer and step."""
    known = _STARTS.get(device)
    if known is None or len(known) <= batch:
        known = torch.arange(max(1025, 2 * batch), dtype=torch.int32, device=device)
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return known[: batch + 1]  # this memory belongs to the graph, whose replays fill it
            torch.cuda.current_stream(device).synchronize()  # since other streams will read it
        _STARTS[device] = known
    return known[: batch + 1]


def _fa3(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return fa3.attend(
        q, key_cache, value_cache, _starts(q.shape[0], q.device), seq_lens, block_table, 1, max_seqlen_k, scale,
        window_left, softcap, k_scale, v_scale, memory("attention_decode", q, out), sinks,
    )  # fmt: skip


def _key(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[tuple[Any, ...], tuple[int, int]]:
    block_size, kv_heads, head_size = key_cache.shape[1:]
    shape = q.shape[1], kv_heads, head_size, block_size, max(window_left + 1, 0), key_cache.dtype
    return shape, (q.shape[0], max_seqlen_k)


def _key_dims(
    heads: int, kv_heads: int, head_size: int, block_size: int, window: int, dtype: torch.dtype, batch: int,
    context: int,
) -> dict[str, Any]:  # fmt: skip
    return {
        "seq_lens": [min(context, attention_decode_cuda.TYPICAL)] * batch, "max_seqlen_k": context, "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size, "block_size": block_size, **optional(window_left=unless(window - 1, -1)),
        # FlashAttention-3 reads a cache in FP8 for queries in FP8 alone
        **({"queries": "float8_e4m3fn"} if dtype == torch.float8_e4m3fn else {}),
    }  # fmt: skip


def _key_longer(
    heads: int, kv_heads: int, head_size: int, block_size: int, window: int, dtype: torch.dtype, batch: int,
    context: int,
) -> dict[str, Any] | None:  # fmt: skip
    of_key = 2 * kv_heads * head_size * dtype.itemsize
    keys = min(context, LONGER, LONGER_BYTES // (of_key * batch))
    return {"seq_lens": [keys] * batch} if min(keys, window or keys) >= LONGER_LEAST else None


def _own(module: Any, args: list[Any]) -> list[Any]:
    """With the soft cap of a host's layer; keys and values stay, since a host's cache may not be there yet."""
    layer = getattr(module, "impl", module)
    names = "logits_soft_cap", "logit_cap", "softcap"  # vLLM's, SGLang's, ours
    softcap = next((value for name in names if (value := getattr(layer, name, None))), 0)
    return [*args[:8], float(softcap), *args[9:]]


attention_decode = define(
    "attention_decode(Tensor q, Tensor key_cache, Tensor value_cache, Tensor seq_lens, Tensor block_table,"
    " SymInt max_seqlen_k, float scale, int window_left=-1, float softcap=0.0, float k_scale=1.0,"
    " float v_scale=1.0, Tensor? sinks=None, Tensor? alibi_slopes=None) -> Tensor",
    fake=lambda q, *args, **kwargs: torch.empty(q.shape, dtype=dtype_of(q), device=q.device),
    providers=(
        # As fast as FA3 and XQA or faster in all measured batches and contexts; they take what it does not support.
        Provider(
            "cuda-split",
            attention_decode_cuda.decode_cuda,
            supports=no_alibi(attention_decode_cuda.supports_cuda, ALIBI),
            params=attention_decode_cuda.PARAMS,
            fits=attention_decode_cuda.fits,
            out=True,
        ),
        Provider("fa3", _fa3, module=fa3.MODULES, supports=no_alibi(fa3.supports, ALIBI), out=True),
        Provider("triton", _triton, supports=supports_triton, out=True),
        Provider(
            "triton-split",
            attention_decode_split.decode_split,
            supports=no_alibi(no_sinks(attention_decode_split.supports_split), ALIBI),
            params=attention_decode_split.PARAMS,
            fits=attention_decode_split.fits,
            out=True,
        ),
        Provider(
            "flashinfer",
            flashinfer.decode,
            module="flashinfer",
            supports=no_alibi(no_sinks(flashinfer.supports_decode), ALIBI),
        ),
        Provider(
            "cpp",
            attention_decode_cpp.decode_cpp,
            devices=("cpu",),
            missing=attention_decode_cpp.missing,
            supports=no_alibi(attention_decode_cpp.supports_cpp, ALIBI),
            out=True,
        ),
        Provider(
            "sdpa",
            attention_decode_cpu.decode_sdpa,
            devices=("cpu",),
            supports=no_alibi(no_sinks(attention_decode_cpu.supports_sdpa), ALIBI),
        ),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        shape=("heads", "kv_heads", "head_size", "block_size", "window", "dtype"),
        sizes=("batch", "context"),
        of=_key,
        dims=_key_dims,
        longer=_key_longer,
        propose=propose_decode,
        own=_own,
        usual={"block_size": (16, 1)},  # vLLM's and SGLang's
    ),
)


def _case(
    name: str, seq_lens: list[int], tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: Any
) -> Case:
    shape = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16, **dims}
    return Case(name, {"seq_lens": seq_lens, **shape}, dtype, weight, tags=(tag,))


_SMALL: dict[str, Any] = {"heads": 3, "kv_heads": 1, "head_size": 64}
# A cache in FP8 as vLLM's FlashAttention-3 has it
_FP8: dict[str, Any] = {"scales": (0.5, 0.75), "queries": "float8_e4m3fn"}
_GPT_OSS: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_size": 64}
SPEC = OpSpec(
    name="attention_decode",
    level=1,
    reference=reference,
    op=attention_decode,
    cases=(
        _case("decode_1", [4096], "model", weight=32),
        _case("decode_1_long", [131072], "model"),
        _case("decode_4_32k", [32768] * 4, "model"),
        _case("fp8_8_32k", [32768] * 8, "model", "float8_e4m3fn", **_FP8),
        # Qwen3-235B-A22B on four GPUs
        _case("group_16_long", [131072], "model", heads=16, kv_heads=1),
        _case("decode_32", [1024] * 32, "model", weight=32),
        # GPT-OSS-20b: half of its 24 layers have a window
        _case("sinks_32", [1024] * 32, "model", weight=12, sinks=True, **_GPT_OSS),
        _case("sinks_window_32", [1024] * 32, "model", weight=12, sinks=True, window_left=127, **_GPT_OSS),
        _case("one", [1], "odd", "float32", heads=1, kv_heads=1, head_size=2, block_size=1),
        _case("smollm2", [5, 17, 131, 1], "odd", **_SMALL),
        _case("head_96", [40, 7], "odd", "float16", heads=6, kv_heads=2, head_size=96, block_size=5),
        _case("window", [70, 3], "odd", "float32", window_left=11, block_size=32, **_SMALL),
        _case("softcap", [33], "odd", "float32", softcap=2.0, **_SMALL),
        _case("empty_sequence", [4, 0, 19], "odd", **_SMALL),
        _case("two_splits", [600, 63], "odd", "float32", **_SMALL),
        _case("graph", [600, 63, 1], "odd", "float32", max_seqlen_k=4096, **_SMALL),
        _case("sinks", [5, 1, 131, 0], "odd", "float32", sinks=True, window_left=20, **_SMALL),
        _case("sinks_splits", [600, 63], "odd", "float32", sinks=True, **_SMALL),
        _case("alibi", [5, 1, 131, 0], "odd", "float32", alibi=True, **_SMALL),
        _case("alibi_splits", [600, 63], "odd", alibi=True, heads=6, kv_heads=6, head_size=64),
        _case("alibi_32", [1024] * 32, "model", alibi=True, heads=32, kv_heads=32, head_size=128),  # MPT-7B
        _case("fp8", [5, 17, 600], "odd", "float8_e4m3fn", scales=(0.5, 0.75), **_SMALL),
    ),
    arguments=(
        Tensor("q", "sequences heads head_size", "queries"),
        *cases.CACHE,
        cases.SEQ_LENS,
        cases.BLOCK_TABLE,
        Scalar("max_seqlen_k"),
        *cases.SCALARS,
        cases.SINKS,
        cases.ALIBI,
    ),
    outputs=(Tensor("out", "sequences heads head_size", "queries"),),
    axes=cases.AXES,
    constraints=("heads % kv_heads == 0", "max_seqlen_k >= max(seq_lens)"),
    values=cases.values,
    flops=cases.FLOPS,
    extremes={**cases.EXTREMES, "one_key": lambda args: args[3].fill_(1)},
    activations=("value_cache",),  # the result is linear in the values
    contained="q",
    tolerance=cases.TOLERANCE,
    baseline="fa3",
)
