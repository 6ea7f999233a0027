"""Index scores of DeepSeek's sparse attention (V3.2): the relevance of each key to each query, from small vectors.

logits[t, s] = sum over heads j of weights[t, j] * max(q[t, j] . k[s], 0), for the keys s that query t sees.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import near, near_size, varied
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import cases
from fastkernels.overrides.attention.paged_cache import take_blocks
from fastkernels.overrides.kit.fp8 import fp8_refusal
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.latent_attention import sparse_cases

CHUNK = 1024  # keys of a program
MAX_HEADS, MAX_SIZE = 128, 256


def reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: float = 1.0,
    k_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [T, H, D]; kv_cache: [blocks, block_size, D], one key for all heads; weights: [T, H] float32.

    cu_seqlens_q: [B + 1] and seq_lens: [B] int32: query i of a sequence's n sees keys 0 .. seq_len - n + i.
    block_table: [B, max_blocks]. The keys are the stored ones times k_scale > 0, and times their own scale > 0 in
    k_scales, [blocks, block_size] float32. Returns [T, max_seqlen_k] in float32 (float64 for float64 weights): -inf
    for keys that a query does not see, and for queries past cu_seqlens_q[B].
    """
    _check(q, kv_cache, weights, cu_seqlens_q, k_scales)
    acc = torch.promote_types(weights.dtype, torch.float32)
    out = torch.full((len(q), max_seqlen_k), float("-inf"), dtype=acc, device=q.device)
    starts = cu_seqlens_q.tolist()
    for i, n_keys in enumerate(seq_lens.tolist()):
        n = starts[i + 1] - starts[i]
        if n == 0 or n_keys == 0:
            continue
        blocks = block_table[i, : cdiv(n_keys, kv_cache.shape[1])].long()
        keys = take_blocks(kv_cache, blocks).flatten(0, 1)[:n_keys].to(acc) * k_scale
        if k_scales is not None:
            keys = keys * k_scales[blocks].flatten()[:n_keys, None].to(acc)
        last = torch.arange(n_keys - n, n_keys, device=q.device)
        unseen = torch.arange(n_keys, device=q.device) > last[:, None]
        rows = slice(starts[i], starts[i + 1])
        total = torch.zeros(n, n_keys, dtype=acc, device=q.device)
        for head in range(q.shape[1]):  # all heads at once would need H times the memory of the result
            total += (q[rows, head].to(acc) @ keys.t()).relu_() * weights[rows, head, None]
        out[rows, :n_keys] = total.masked_fill_(unseen, float("-inf"))
    return out


@triton.jit(do_not_specialize=["table_stride", "K"])
def _logits_kernel(
    q_ptr, kv_ptr, w_ptr, out_ptr, cu_ptr, len_ptr, table_ptr, scales_ptr, q_stride_t, q_stride_h, kv_stride_b,
    kv_stride_s, w_stride, table_stride, scales_stride, block_size, heads, D, K, k_scale,
    SCALES: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (query, sequence, chunk of keys): a key is read once for all heads.
    seq = tl.program_id(1).to(tl.int64)
    start = tl.load(cu_ptr + seq)
    n_q = tl.load(cu_ptr + seq + 1) - start
    i = tl.program_id(0)
    if i < n_q:
        token = (start + i).to(tl.int64)
        seen = tl.load(len_ptr + seq) - n_q + i + 1
        head, channel = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        used = (head < heads)[:, None] & (channel < D)[None, :]
        q_at = q_ptr + token * q_stride_t + head[:, None] * q_stride_h + channel[None, :]
        q = tl.load(q_at, mask=used, other=0.0)
        w = tl.load(w_ptr + token * w_stride + head, mask=head < heads, other=0.0) * k_scale
        low = tl.program_id(2) * CHUNK
        high = tl.minimum(low + CHUNK, K)
        end = tl.minimum(tl.cdiv(seen, BLOCK_N) * BLOCK_N, high)
        for begin in range(low, end, BLOCK_N):
            cols = begin + tl.arange(0, BLOCK_N)
            inside = cols < seen
            page = tl.load(table_ptr + seq * table_stride + cols // block_size, mask=inside, other=0)
            at = page.to(tl.int64) * kv_stride_b + (cols % block_size).to(tl.int64) * kv_stride_s
            k_mask = inside[:, None] & (channel < D)[None, :]
            k = tl.load(kv_ptr + at[:, None] + channel[None, :], mask=k_mask, other=0.0).to(q.dtype)
            each = tl.maximum(tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
            total = tl.sum(each * w[:, None], 0)
            if SCALES:  # positive, so that they may come after the maximum
                at = page.to(tl.int64) * scales_stride + cols % block_size
                total *= tl.load(scales_ptr + at, mask=inside, other=0.0)
            tl.store(out_ptr + token * K + cols, tl.where(inside, total, float("-inf")), mask=cols < K)
        for begin in range(tl.maximum(low, end), high, BLOCK_N):
            cols = begin + tl.arange(0, BLOCK_N)
            tl.store(out_ptr + token * K + cols, float("-inf"), mask=cols < K)


def _check(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, cu_seqlens_q: torch.Tensor,
    k_scales: torch.Tensor | None,
) -> None:  # fmt: skip
    if q.dim() != 3 or kv_cache.dim() != 3 or q.shape[2] != kv_cache.shape[2]:
        raise ValueError(
            f"paged_mqa_logits: q must be [T, H, D] and kv_cache [blocks, block_size, D], got {tuple(q.shape)} and"
            f" {tuple(kv_cache.shape)}"
        )
    if weights.shape != q.shape[:2]:
        raise ValueError(
            f"paged_mqa_logits: weights must be [T, H] = {tuple(q.shape[:2])}, got {tuple(weights.shape)}"
        )
    if cu_seqlens_q.dim() != 1 or len(cu_seqlens_q) == 0:
        raise ValueError(f"paged_mqa_logits: cu_seqlens_q must be [B + 1], got {tuple(cu_seqlens_q.shape)}")
    if k_scales is not None and k_scales.shape != kv_cache.shape[:2]:
        raise ValueError(
            f"paged_mqa_logits: k_scales must be [blocks, block_size] = {tuple(kv_cache.shape[:2])}, got"
            f" {tuple(k_scales.shape)}"
        )


def _supports_triton(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, k_scale: float = 1.0,
    k_scales: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {q.dtype} is not float16, bfloat16 or float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if kv_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"the cache is {kv_cache.dtype}, q is {q.dtype}"
    if kv_cache.dtype == torch.float8_e4m3fn and (reason := fp8_refusal(q.device)) is not None:
        return reason
    if weights.dtype != torch.float32:
        return f"weights are {weights.dtype}, not float32"
    if k_scales is not None and k_scales.dtype != torch.float32:
        return f"k_scales are {k_scales.dtype}, not float32"
    if q.shape[1] > MAX_HEADS or q.shape[2] > MAX_SIZE:
        return f"{q.shape[1]} heads of {q.shape[2]} channels are over {MAX_HEADS} of {MAX_SIZE}"
    for name, t in (("q", q), ("kv_cache", kv_cache), ("weights", weights), ("k_scales", k_scales)):
        if t is not None and t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, block_table: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, k_scale: float = 1.0,
    k_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(q, kv_cache, weights, cu_seqlens_q, k_scales)
    (tokens, heads, size), batch = q.shape, len(seq_lens)
    out = torch.empty(tokens, max_seqlen_k, dtype=torch.float32, device=q.device)
    # The kernel does not reach padding. A batch of decodes has none.
    if max_seqlen_q * batch != tokens or max_seqlen_q > 1:
        out.fill_(float("-inf"))
    if batch == 0 or max_seqlen_q == 0 or max_seqlen_k == 0:
        return out
    launch_kernel(
        _logits_kernel, (max_seqlen_q, batch, cdiv(max_seqlen_k, CHUNK)), q, kv_cache, weights, out, cu_seqlens_q,
        seq_lens, block_table, k_scales, *q.stride()[:2], *kv_cache.stride()[:2], weights.stride(0),
        block_table.stride(0), 0 if k_scales is None else k_scales.stride(0), kv_cache.shape[1], heads, size,
        max_seqlen_k, k_scale, SCALES=k_scales is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        CHUNK=CHUNK, BLOCK_H=max(next_power_of_2(heads), 16), BLOCK_N=32 if q.dtype == torch.float32 else 64,
        BLOCK_D=max(next_power_of_2(size), 16), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def _fake(q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, *rest: Any) -> torch.Tensor:
    return q.new_empty(q.shape[0], rest[4], dtype=torch.float32)


paged_mqa_logits = define(
    "paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor cu_seqlens_q, Tensor seq_lens,"
    " Tensor block_table, SymInt max_seqlen_q, SymInt max_seqlen_k, float k_scale=1.0,"
    " Tensor? k_scales=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, q_lens: list[int], seq_lens: list[int], tag: str, dtype: str = "bfloat16", **dims: Any
) -> Case:
    given = {"q_lens": q_lens, "seq_lens": seq_lens, **_DEEPSEEK, **dims}
    return Case(name, given, dtype, 61 if max(q_lens, default=0) == 1 and tag == "model" else 1, tags=(tag,))


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Weights with which the logits have a variance of about 1."""
    std = (call["heads"] * call["head_size"]) ** -0.5
    weights = call.randn(call["tokens"], call["heads"]) * std
    return {**cases.values(call), "weights": weights}


def _key_scales(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Positive numbers around 1."""
    return call.randn(*shape).exp2().to(dtype)


def _vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        own = {
            "heads": near(case.dims["heads"], rng), "head_size": near_size(case.dims["head_size"], rng),
        }  # fmt: skip
        return {**sparse_cases.draw_batch(case, rng), **own}

    return varied(case, draw, SPEC.bytes_moved, SPEC.flops)


def _negative(args: list[Any]) -> None:
    args[2].copy_(-args[2].abs())


_DEEPSEEK: dict[str, Any] = {"heads": 64, "head_size": 128, "block_size": 64}
_SMALL: dict[str, Any] = {"heads": 3, "head_size": 24, "block_size": 16}
_DROPPED = ("kv_heads", "scales", "scale")
SPEC = OpSpec(
    name="paged_mqa_logits",
    level=1,
    reference=reference,
    op=paged_mqa_logits,
    cases=(
        _case("decode_1", [1], [16384], "model"),
        _case("decode_32", [1] * 32, [4096] * 32, "model"),
        _case("glm_32", [1] * 32, [4096] * 32, "model", heads=32),
        _case("prefill_4k", [4096], [4096], "model"),
        _case("chunked", [512, 256], [8192, 4096], "model"),
        _case("one", [1], [1], "odd", "float32", heads=1, head_size=1, block_size=1),
        _case("odd", [5, 1, 9], [5, 17, 31], "odd", **_SMALL),
        _case("half", [3, 7], [40, 7], "odd", "float16", heads=5, head_size=40, block_size=5),
        _case("padding", [5, 1], [5, 17], "odd", "float32", padding=3, **_SMALL),
        _case("empty_sequence", [4, 0, 2], [4, 0, 19], "odd", "float32", **_SMALL),
        _case("two_chunks", [1, 1], [1100, 63], "odd", "float32", **_SMALL),
        _case("graph", [1, 1], [60, 3], "odd", "float32", max_seqlen_k=128, **_SMALL),
        _case("fp8", [5, 1, 9], [5, 17, 70], "odd", "float8_e4m3fn", k_scale=0.5, **_SMALL),
        _case("decode_32_fp8", [1] * 32, [4096] * 32, "model", "float8_e4m3fn", k_scales=True),
        _case("prefill_4k_fp8", [4096], [4096], "model", "float8_e4m3fn", k_scales=True),
        _case("scales", [5, 1, 9], [5, 17, 70], "odd", "float8_e4m3fn", k_scales=True, padding=2, **_SMALL),
    ),
    arguments=(
        Tensor("q", "tokens heads head_size", "queries", bytes="attended * heads * head_size * itemsize(queries)"),
        Tensor("kv_cache", "blocks block_size head_size", bytes="keys_read * head_size * itemsize(dtype)"),
        Tensor("weights", "tokens heads", "float32"),
        Tensor("cu_seqlens_q", "sequences+1", "int32", bytes="0"),
        cases.SEQ_LENS,
        cases.BLOCK_TABLE,
        Scalar("max_seqlen_q"),
        Scalar("max_seqlen_k"),
        Scalar("k_scale", default=1.0),
        Tensor("k_scales", "blocks block_size", "float32", when="k_scales", values=_key_scales, bytes="4 * keys_read"),
    ),
    outputs=(Tensor("logits", "tokens max_seqlen_k", "float32"),),
    axes={
        **{name: axis for name, axis in cases.AXES.items() if name not in _DROPPED}, **cases.RAGGED,
        "head_size": Axis.width(), "k_scales": Axis.option(False),
    },
    constraints=("max_seqlen_k >= max(seq_lens)",),
    values=_values,
    flops="pairs * heads * (2 * head_size + 2)",
    vary=_vary,
    extremes={**cases.EXTREMES, "negative_weights": _negative},
    # float32 results for every dtype of the keys
    tolerance={
        "float32": Tolerance(1e-5, 1e-5), "float16": Tolerance(1e-3, 1e-3), "bfloat16": Tolerance(1e-3, 1e-3),
        "float8_e4m3fn": Tolerance(1e-3, 1e-3),
    },
)  # fmt: skip
