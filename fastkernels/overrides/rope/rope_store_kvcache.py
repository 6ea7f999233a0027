"""Everything between a layer's qkv projection and its attention in one launch.

That is norms of the query and key heads (if the model has them), rotary embedding, and storing keys and values in the
paged KV cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import TOLERANCE, Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.cache import store_kvcache
from fastkernels.overrides.cache.store_kvcache import (
    CACHE_AXES,
    CACHE_SHAPE,
    random_slots,
    round_e4m3,
)
from fastkernels.overrides.kit.fp8 import FP8, fp8_refusal
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.norm import rms_norm
from fastkernels.overrides.rope import cases, rotary_emb


def reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    offset: float = 0.0,
    norm_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply rms_norm to each head (with q_weight, k_weight: [D]), rotary_emb and store_kvcache, with their roundings.

    rms_norm is without cast_x_before_out_mul: it rounds once, after the product with the weight. rotary_emb has
    cast_cache. offset is added to both weights: 1 for gemma_rms_norm. norm_value: value heads are normalized without a
    weight (Gemma 4). positions: [T]; query: [T, Hq, D]; key, value: [T, Hkv, D]; the others as in those ops.
    Returns new (query, key_cache, value_cache); key is not changed.
    """
    query, key = _normed(query, q_weight, eps, offset), _normed(key, k_weight, eps, offset)
    value = rms_norm.reference(value, None, eps)[0] if norm_value else value
    query, turned = rotary_emb.reference(positions, query, key, query.shape[-1], cos_sin_cache, is_neox_style)
    assert turned is not None
    caches = store_kvcache.reference(turned, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    return query, *caches


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    if weight is None:
        return x
    weight = weight if offset == 0.0 else weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
    return rms_norm.reference(x, weight, eps, None, None, False)[0]


@triton.jit
def _normalize(x1, x2, rest, w_ptr, at1, at2, pair, more, HALF, D, eps, offset, REST: tl.constexpr):
    # As rms_norm: rounded to the dtype once, after the product with the weight. x1, x2, rest: [heads, ...] in the
    # dtype, zeros where there is no channel.
    dtype = x1.dtype
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
    if REST:
        rest = rest.to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / D + eps)[:, None]
    w1 = offset + tl.load(w_ptr + at1, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    w2 = offset + tl.load(w_ptr + at2, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    x1 = (x1 * scale * w1).to(dtype)
    x2 = (x2 * scale * w2).to(dtype)
    if REST:
        w = offset + tl.load(w_ptr + more, mask=more < D, other=0.0).to(tl.float32)[None, :]
        rest = (rest * scale * w).to(dtype)
    return x1, x2, rest


@triton.jit
def _stored(x, scale, FP8: tl.constexpr):
    # The value that store_kvcache writes for x.
    if FP8:
        x = round_e4m3(x.to(tl.float32) / scale)
    return x


@triton.jit
def _rope_store_kernel(
    pos_ptr, q_ptr, k_ptr, v_ptr, kc_ptr, vc_ptr, slot_ptr, table_ptr, qw_ptr, kw_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    kc_stride_b, kc_stride_s, kc_stride_h, vc_stride_b, vc_stride_s, vc_stride_h, table_stride,
    block_size, n_q, n_k, q_blocks, k_blocks, D, HALF, eps, k_scale, v_scale, offset,
    NEOX: tl.constexpr, NORM: tl.constexpr, NORM_V: tl.constexpr, FP8: tl.constexpr, REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (token, block of heads): blocks of the query's heads, then the key's, then the value's.
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < q_blocks + k_blocks:
        is_query = block < q_blocks
        heads = tl.where(is_query, block, block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        there = heads < tl.where(is_query, n_q, n_k)
        pair, more = tl.arange(0, BLOCK), 2 * HALF + tl.arange(0, BLOCK_R)
        row = table_ptr + tl.load(pos_ptr + token).to(tl.int64) * table_stride
        dtype = q_ptr.dtype.element_ty
        cos = (
            tl.load(row + pair, mask=pair < HALF, other=0.0).to(tl.float32).to(dtype).to(tl.float32)[None, :]
        )
        sin = (
            tl.load(row + HALF + pair, mask=pair < HALF, other=0.0)
            .to(tl.float32)
            .to(dtype)
            .to(tl.float32)[None, :]
        )
        if NEOX:
            at1, at2 = pair, pair + HALF
        else:
            at1, at2 = 2 * pair, 2 * pair + 1
        if is_query:
            x_at = q_ptr + token * q_stride_t + heads.to(tl.int64)[:, None] * q_stride_h
        else:
            x_at = k_ptr + token * k_stride_t + heads.to(tl.int64)[:, None] * k_stride_h
        mask, more_mask = there[:, None] & (pair < HALF)[None, :], there[:, None] & (more < D)[None, :]
        x1 = tl.load(x_at + at1[None, :], mask=mask, other=0.0)
        x2 = tl.load(x_at + at2[None, :], mask=mask, other=0.0)
        rest = x1
        if REST:
            rest = tl.load(x_at + more[None, :], mask=more_mask, other=0.0)
        if NORM:
            w_ptr = qw_ptr
            if not is_query:
                w_ptr = kw_ptr
            x1, x2, rest = _normalize(x1, x2, rest, w_ptr, at1, at2, pair, more, HALF, D, eps, offset, REST)
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        a, b, c, d = x1 * cos, x2 * sin, x2 * cos, x1 * sin
        y1, y2 = (a - b).to(dtype), (c + d).to(dtype)
        if is_query:
            tl.store(x_at + at1[None, :], y1, mask=mask)
            tl.store(x_at + at2[None, :], y2, mask=mask)
            if REST and NORM:
                tl.store(x_at + more[None, :], rest, mask=more_mask)
        else:
            slot = tl.load(slot_ptr + token).to(tl.int64)
            if slot >= 0:
                to = kc_ptr + (slot // block_size) * kc_stride_b + (slot % block_size) * kc_stride_s
                to += heads.to(tl.int64)[:, None] * kc_stride_h
                stored = kc_ptr.dtype.element_ty
                tl.store(to + at1[None, :], _stored(y1, k_scale, FP8).to(stored), mask=mask)
                tl.store(to + at2[None, :], _stored(y2, k_scale, FP8).to(stored), mask=mask)
                if REST:
                    tl.store(to + more[None, :], _stored(rest, k_scale, FP8).to(stored), mask=more_mask)
    else:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        if slot >= 0:
            heads = ((block - q_blocks - k_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
            dims = tl.arange(0, BLOCK_D)[None, :]
            mask = (heads < n_k) & (dims < D)
            v = tl.load(v_ptr + token * v_stride_t + heads * v_stride_h + dims, mask=mask, other=0.0)
            if NORM_V:
                wide = v.to(tl.float32)
                v = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]).to(v.dtype)
            to = vc_ptr + (slot // block_size) * vc_stride_b + (slot % block_size) * vc_stride_s
            tl.store(
                to + heads * vc_stride_h + dims,
                _stored(v, v_scale, FP8).to(vc_ptr.dtype.element_ty),
                mask=mask,
            )


def _supports_triton(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    offset: float = 0.0,
    norm_value: bool = False,
) -> str | None:
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {query.dtype} is not float16, bfloat16 or float32"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}"
    if query.shape[-1] > 1024:
        return f"head size {query.shape[-1]} is over 1024"
    tensors = {
        "positions": positions, "query": query, "key": key, "value": value, "key_cache": key_cache,
        "value_cache": value_cache, "slot_mapping": slot_mapping, "cos_sin_cache": cos_sin_cache,
        "q_weight": q_weight, "k_weight": k_weight,
    }  # fmt: skip
    for name, t in tensors.items():
        if t is not None and t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    if key_cache.dtype == torch.float8_e4m3fn:
        return fp8_refusal(key.device)
    if (k_scale, v_scale) != (1.0, 1.0):
        return f"k_scale {k_scale} and v_scale {v_scale} are for fp8 caches, these are {key_cache.dtype}"
    return None


def _check(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
) -> None:
    if query.dim() != 3 or query.shape[::2] != key.shape[::2] or positions.shape != query.shape[:1]:
        raise ValueError(
            f"rope_store_kvcache: query [T, Hq, D], key [T, Hkv, D] and positions [T] do not match:"
            f" {tuple(query.shape)}, {tuple(key.shape)} and {tuple(positions.shape)}"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("rope_store_kvcache: q_weight and k_weight must be given both or not at all")
    store_kvcache.check(key, value, key_cache, value_cache, slot_mapping)
    rotary_emb.check(positions, query, query.shape[2], cos_sin_cache)


def _triton(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    offset: float = 0.0,
    norm_value: bool = False,
) -> None:
    _check(
        positions, query, key, value, key_cache, value_cache, slot_mapping, cos_sin_cache, q_weight, k_weight
    )
    tokens, n_q, d = query.shape
    n_k, half = key.shape[1], cos_sin_cache.shape[-1] // 2
    if tokens == 0:
        return
    block_h = min(next_power_of_2(max(n_q, n_k)), max(1, 1024 // next_power_of_2(d)))
    q_blocks, k_blocks, rest = cdiv(n_q, block_h), cdiv(n_k, block_h), d - 2 * half
    grid = (tokens, q_blocks + 2 * k_blocks)
    launch_kernel(
        _rope_store_kernel, grid,
        positions, query, key, value, key_cache, value_cache, slot_mapping, cos_sin_cache, q_weight, k_weight,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], cos_sin_cache.stride(0), key_cache.shape[1], n_q, n_k, q_blocks, k_blocks, d, half,
        eps, k_scale, v_scale, offset, NEOX=is_neox_style, NORM=q_weight is not None, NORM_V=norm_value,
        FP8=key_cache.dtype == torch.float8_e4m3fn, REST=rest > 0, BLOCK_H=block_h,
        BLOCK=max(next_power_of_2(half), 1), BLOCK_R=next_power_of_2(max(rest, 1)),
        BLOCK_D=next_power_of_2(d), num_warps=4,
    )  # fmt: skip


def _reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    offset: float = 0.0,
    norm_value: bool = False,
) -> None:
    _check(
        positions, query, key, value, key_cache, value_cache, slot_mapping, cos_sin_cache, q_weight, k_weight
    )
    query.copy_(_normed(query, q_weight, eps, offset))
    turned = _normed(key, k_weight, eps, offset).clone()
    value = rms_norm.reference(value, None, eps)[0] if norm_value else value
    rotary_emb.rotate_in_place(positions, query, turned, query.shape[-1], cos_sin_cache, is_neox_style)
    store_kvcache.store_in_place(turned, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


def _same_tokens(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor,
    value_cache: torch.Tensor, slot_mapping: torch.Tensor, *_: Any, **__: Any,
) -> None:  # fmt: skip
    """Tell torch.compile that these have the same number of tokens; see rotary_emb's."""
    for x in (query, key, value, slot_mapping):
        if isinstance(x.shape[0], torch.SymInt):
            torch._check(positions.shape[0] == x.shape[0])


rope_store_kvcache = define(
    "rope_store_kvcache(Tensor positions, Tensor(a!) query, Tensor key, Tensor value, Tensor(b!) key_cache,"
    " Tensor(c!) value_cache, Tensor slot_mapping, Tensor cos_sin_cache, bool is_neox_style, Tensor? q_weight=None,"
    " Tensor? k_weight=None, float eps=1e-6, float k_scale=1.0, float v_scale=1.0, float offset=0.0,"
    " bool norm_value=False) -> ()",
    fake=_same_tokens,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Slice query, key and value from one packed tensor, as models do."""
    sizes = [call["heads"], call["kv_heads"], call["kv_heads"]]
    qkv = call.normal((call["tokens"], sum(sizes), call["head_size"]), getattr(torch, call["kv_dtype"]))
    return dict(zip(("query", "key", "value"), qkv.split(sizes, dim=1), strict=True))


_STORED = "stored * kv_heads * head_size"


def _large(args: list[Any], factor: float = 64.0) -> None:
    """Scale values up, within the range of an fp8 cache: the float64 reference does not saturate."""
    fp8 = args[4].dtype == FP8
    for t in args[1:4]:
        t.mul_(min(factor, 32.0) if fp8 else factor)


def _outlier(args: list[Any]) -> None:
    for t in args[1:4]:
        t[-1, -1, -1] = 100.0 if args[4].dtype == FP8 else 1000.0


def _all_padding(args: list[Any]) -> None:
    args[6].fill_(-1)


def _last_position(args: list[Any]) -> None:
    args[0].fill_(args[7].shape[0] - 1)


def _odd(name: str, dtype: str = "bfloat16", **dims: Any) -> Case:
    shape = {"heads": 4, "kv_heads": 2, "head_size": 64, "block_size": 16, **dims}
    return Case(name, shape, dtype, tags=("odd",))


_LLAMA = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}
SPEC = OpSpec(
    name="rope_store_kvcache",
    level=1,
    reference=reference,
    op=rope_store_kvcache,
    cases=(
        Case("decode_1", {"tokens": 1, **_LLAMA}, weight=32, tags=("model",)),
        Case("decode_32", {"tokens": 32, **_LLAMA}, weight=32, tags=("model",)),
        Case("decode_32_norms", {"tokens": 32, **_LLAMA, "norms": True}, weight=32, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, **_LLAMA}, weight=1, tags=("model",)),
        _odd("one", "float32", tokens=1, heads=1, kv_heads=1, head_size=2, block_size=1),
        _odd("smollm2", tokens=63, heads=9, kv_heads=3),
        _odd("norms", tokens=17, heads=6, padded=3, norms=True),
        _odd("norms_partial", "float16", tokens=7, heads=5, kv_heads=5, head_size=96, rotary_dim=24, norms=True),
        _odd("gemma_norms", tokens=5, heads=4, head_size=80, norms=True, offset=1.0),
        _odd("gemma4_norms", "float16", tokens=9, heads=3, kv_heads=1, head_size=48, norms=True, norm_value=True),
        _odd("interleaved_partial", "float32", tokens=5, heads=3, kv_heads=1, head_size=80, rotary_dim=34, neox=False),
        _odd("padded", "float16", tokens=33, block_size=7, padded=2, slots="int32"),
        _odd("neox_partial", tokens=7, kv_heads=4, head_size=96, rotary_dim=24, block_size=32),
        _odd("fp8", "float8_e4m3fn", tokens=9, head_size=80, scales=(0.5, 0.75)),
    ),
    arguments=(
        Tensor("positions", "tokens", "positions", values=cases.random_positions),
        Tensor("query", "tokens heads head_size", "kv_dtype", mutated=True,
               bytes="2 * tokens * heads * changed * itemsize(kv_dtype)"),
        Tensor("key", "tokens kv_heads head_size", "kv_dtype", bytes=f"{_STORED} * itemsize(kv_dtype)"),
        Tensor("value", "tokens kv_heads head_size", "kv_dtype", bytes=f"{_STORED} * itemsize(kv_dtype)"),
        Tensor("key_cache", CACHE_SHAPE, mutated=True, bytes=f"{_STORED} * itemsize(dtype)"),
        Tensor("value_cache", CACHE_SHAPE, mutated=True, bytes=f"{_STORED} * itemsize(dtype)"),
        Tensor("slot_mapping", "tokens", "slots", values=random_slots),
        Tensor("cos_sin_cache", "max_positions rotary_dim", "cache", values=cases.table, bytes=cases.TABLE_BYTES),
        Scalar("is_neox_style", "neox"),
        Tensor("q_weight", "head_size", "kv_dtype", when="norms", mean=1, std=0.1, bytes="0"),
        Tensor("k_weight", "head_size", "kv_dtype", when="norms", mean=1, std=0.1, bytes="0"),
        Scalar("eps", default=1e-6),
        Scalar("k_scale", dim="scales", index=0),
        Scalar("v_scale", dim="scales", index=1),
        Scalar("offset", default=0.0),
        Scalar("norm_value", default=False),
    ),
    axes={
        **cases.AXES,
        **CACHE_AXES,
        "cache": Axis.dtype(Expr("kv_dtype")),
        "changed": Axis(Expr("head_size if norms else rotary_dim")),  # channels of a query
    },
    constraints=cases.CONSTRAINTS,
    values=_values,
    flops="tokens * (heads + kv_heads) * (3 * rotary_dim + (4 * head_size if norms else 0))",
    extremes={
        "all_padding": _all_padding, "last_position": _last_position, "large": _large, "outlier": _outlier
    },
    activations=("query", "key", "value"),
    stands_for=("rotary_emb", "store_kvcache"),
    # e4m3 has three bits of fraction: half a step, and keys are rounded before.
    tolerance={**TOLERANCE, "float8_e4m3fn": Tolerance(2**-9, 0.066)},
    batch_invariant=True,  # a program has one token; its block of heads depends on the heads only
)  # fmt: skip
