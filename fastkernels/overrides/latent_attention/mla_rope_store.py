"""Everything between the projections of latent attention and its attention in one launch.

That is the norm of the latents, the rotary embedding of queries and of the common key, and storing both in the cache.
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
from fastkernels.overrides.cache import concat_and_cache_mla
from fastkernels.overrides.cache.store_kvcache import CACHE_AXES, random_slots, round_e4m3
from fastkernels.overrides.kit.fp8 import fp8_refusal
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.norm import rms_norm
from fastkernels.overrides.rope import cases, rotary_emb


def reference(
    positions: torch.Tensor, query: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, kv_cache: torch.Tensor,
    rotated: torch.Tensor, slot_mapping: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox_style: bool,
    cast_cache: bool = True, eps: float = 1e-6, k_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Apply rms_norm, rotary_emb and concat_and_cache_mla, with their roundings.

    positions: [T]; query: [T, H, P], the rotary channels of the queries; latent: [T, R + P], latents before their norm
    and rotary keys; weight: [R]; kv_cache: [blocks, block_size, R + P]; rotated: [T, H, P], which gets the rotated
    queries and may be query itself; the others as in those ops. Returns new (kv_cache, rotated).
    """
    kv_cache, rotated = kv_cache.clone(), rotated.clone()
    how = (slot_mapping, cos_sin_cache, is_neox_style, cast_cache, eps, k_scale)
    _reference(positions, query, latent, weight, kv_cache, rotated, *how)
    return kv_cache, rotated


@triton.jit(do_not_specialize=["heads"])
def _mla_rope_store_kernel(
    pos_ptr, q_ptr, new_ptr, x_ptr, w_ptr, cache_ptr, slot_ptr, table_ptr,
    q_stride_t, q_stride_h, new_stride_t, new_stride_h, x_stride, cache_stride_b, cache_stride_s, table_stride,
    block_size, heads, q_blocks, R, HALF, eps, k_scale,
    NEOX: tl.constexpr, CAST: tl.constexpr, FP8: tl.constexpr, WORDS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (token, block of heads); one more for the token's latent and its rotary key.
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = x_ptr.dtype.element_ty
    pair, channel = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    row = table_ptr + tl.load(pos_ptr + token).to(tl.int64) * table_stride
    cos = tl.load(row + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    if CAST:
        cos, sin = cos.to(dtype).to(tl.float32), sin.to(dtype).to(tl.float32)
    if NEOX:
        first, second = pair, pair + HALF
    else:
        first, second = 2 * pair, 2 * pair + 1
    if block < q_blocks:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        mask = (head < heads) & (pair < HALF)[None, :]
        q_at = q_ptr + token * q_stride_t + head * q_stride_h
        if WORDS:  # a pair of neighbors
            words = q_at.to(tl.pointer_type(tl.int32), bitcast=True) + pair[None, :]
            word = tl.load(words, mask=mask, other=0)
            x1 = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            x2 = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        else:
            x1 = tl.load(q_at + first[None, :], mask=mask, other=0.0).to(tl.float32)
            x2 = tl.load(q_at + second[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b, c, d = x1 * cos[None, :], x2 * sin[None, :], x2 * cos[None, :], x1 * sin[None, :]
        new_at = new_ptr + token * new_stride_t + head * new_stride_h
        y1, y2 = (a - b).to(dtype), (c + d).to(dtype)
        if WORDS:
            low = y1.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            word = low | (y2.to(tl.int16, bitcast=True).to(tl.int32) << 16)
            tl.store(new_at.to(tl.pointer_type(tl.int32), bitcast=True) + pair[None, :], word, mask=mask)
        else:
            tl.store(new_at + first[None, :], y1, mask=mask)
            tl.store(new_at + second[None, :], y2, mask=mask)
    else:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        if slot >= 0:
            x_at = x_ptr + token * x_stride
            to = cache_ptr + (slot // block_size) * cache_stride_b + (slot % block_size) * cache_stride_s
            stored = cache_ptr.dtype.element_ty
            x = tl.load(x_at + channel, mask=channel < R, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + channel, mask=channel < R, other=0.0).to(tl.float32)
            x1 = tl.load(x_at + R + first, mask=pair < HALF, other=0.0).to(tl.float32)
            x2 = tl.load(x_at + R + second, mask=pair < HALF, other=0.0).to(tl.float32)
            y = (x * tl.rsqrt(tl.sum(x * x, 0) / R + eps)).to(dtype).to(tl.float32)
            y = (y * w).to(dtype)
            a, b, c, d = x1 * cos, x2 * sin, x2 * cos, x1 * sin
            y1, y2 = (a - b).to(dtype), (c + d).to(dtype)
            if FP8:
                y = round_e4m3(y.to(tl.float32) / k_scale)
                y1 = round_e4m3(y1.to(tl.float32) / k_scale)
                y2 = round_e4m3(y2.to(tl.float32) / k_scale)
            tl.store(to + channel, y.to(stored), mask=channel < R)
            tl.store(to + R + first, y1.to(stored), mask=pair < HALF)
            tl.store(to + R + second, y2.to(stored), mask=pair < HALF)


def _supports_triton(
    positions: torch.Tensor, query: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, kv_cache: torch.Tensor,
    rotated: torch.Tensor, slot_mapping: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox_style: bool,
    cast_cache: bool = True, eps: float = 1e-6, k_scale: float = 1.0,
) -> str | None:  # fmt: skip
    if latent.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {latent.dtype} is not float16, bfloat16 or float32"
    if not query.dtype == latent.dtype == rotated.dtype:
        return f"query, latent and rotated are {query.dtype}, {latent.dtype} and {rotated.dtype}"
    tensors = {
        "positions": positions, "query": query, "latent": latent, "weight": weight, "kv_cache": kv_cache,
        "rotated": rotated, "slot_mapping": slot_mapping, "cos_sin_cache": cos_sin_cache,
    }  # fmt: skip
    for name, t in tensors.items():
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    if kv_cache.dtype == torch.float8_e4m3fn:
        return fp8_refusal(latent.device)
    return None if k_scale == 1.0 else f"k_scale {k_scale} is for fp8 caches, this is {kv_cache.dtype}"


def _check(
    positions: torch.Tensor, query: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, kv_cache: torch.Tensor,
    rotated: torch.Tensor, slot_mapping: torch.Tensor, cos_sin_cache: torch.Tensor,
) -> None:  # fmt: skip
    size, rank = cos_sin_cache.shape[-1], weight.shape[0]
    tokens = len(positions)
    if query.dim() != 3 or query.shape[::2] != (tokens, size) or rotated.shape != query.shape:
        raise ValueError(
            f"mla_rope_store: query {tuple(query.shape)} and rotated {tuple(rotated.shape)} must be [{tokens}, H,"
            f" {size}], as positions and cos_sin_cache"
        )
    if latent.shape != (tokens, rank + size) or slot_mapping.shape != (tokens,):
        raise ValueError(
            f"mla_rope_store: latent {tuple(latent.shape)} and slot_mapping {tuple(slot_mapping.shape)} must be"
            f" [{tokens}, {rank + size}] and [{tokens}]"
        )
    if kv_cache.dim() != 3 or kv_cache.shape[2] != rank + size:
        raise ValueError(
            f"mla_rope_store: kv_cache {tuple(kv_cache.shape)} is not [blocks, block_size, {rank + size}]"
        )


def _triton(
    positions: torch.Tensor, query: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, kv_cache: torch.Tensor,
    rotated: torch.Tensor, slot_mapping: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox_style: bool,
    cast_cache: bool = True, eps: float = 1e-6, k_scale: float = 1.0,
) -> None:  # fmt: skip
    _check(positions, query, latent, weight, kv_cache, rotated, slot_mapping, cos_sin_cache)
    (tokens, heads, size), rank = query.shape, weight.shape[0]
    if tokens == 0:
        return
    block = next_power_of_2(size // 2)
    block_h = min(next_power_of_2(heads), max(1, 1024 // block))
    q_blocks = cdiv(heads, block_h)
    words = query.itemsize == 2 and not is_neox_style
    words = words and all(
        t.data_ptr() % 4 == 0 and not any(s % 2 for s in t.stride()[:2]) for t in (query, rotated)
    )
    launch_kernel(
        _mla_rope_store_kernel, (tokens, q_blocks + 1),
        positions, query, rotated, latent, weight, kv_cache, slot_mapping, cos_sin_cache, *query.stride()[:2],
        *rotated.stride()[:2], latent.stride(0), *kv_cache.stride()[:2], cos_sin_cache.stride(0), kv_cache.shape[1],
        heads, q_blocks, rank, size // 2, eps, k_scale, NEOX=is_neox_style, CAST=cast_cache,
        FP8=kv_cache.dtype == torch.float8_e4m3fn, WORDS=words, BLOCK_H=block_h, BLOCK=block,
        BLOCK_R=next_power_of_2(rank), num_warps=4,
    )  # fmt: skip


def _reference(
    positions: torch.Tensor, query: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, kv_cache: torch.Tensor,
    rotated: torch.Tensor, slot_mapping: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox_style: bool,
    cast_cache: bool = True, eps: float = 1e-6, k_scale: float = 1.0,
) -> None:  # fmt: skip
    _check(positions, query, latent, weight, kv_cache, rotated, slot_mapping, cos_sin_cache)
    rank = weight.shape[0]
    normed, _ = rms_norm.reference(latent[:, :rank], weight, eps)
    key = latent[:, None, rank:]
    new, turned = rotary_emb.reference(
        positions, query, key, query.shape[2], cos_sin_cache, is_neox_style, cast_cache
    )
    assert turned is not None
    rotated.copy_(new)
    concat_and_cache_mla.store_in_place(normed, turned[:, 0], kv_cache, slot_mapping, k_scale)


mla_rope_store = define(
    "mla_rope_store(Tensor positions, Tensor query, Tensor latent, Tensor weight, Tensor(a!) kv_cache,"
    " Tensor(b!) rotated, Tensor slot_mapping, Tensor cos_sin_cache, bool is_neox_style, bool cast_cache=True,"
    " float eps=1e-6, float k_scale=1.0) -> ()",
    fake=lambda *args, **kwargs: None,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Slice the queries from whole heads, as models do; `rotated` are channels of absorbed queries."""
    tokens, heads, rank, size = (call[name] for name in ("tokens", "heads", "latent", "rope"))
    dtype = getattr(torch, call["kv_dtype"])
    return {
        "query": call.normal((tokens, heads, 2 * size), dtype)[..., size:],
        "latent": call.normal((tokens, rank + size), dtype),
        "rotated": call.normal((tokens, heads, rank + size), dtype)[..., rank:],
    }


def _large(args: list[Any]) -> None:
    args[1].mul_(64.0)


def _all_padding(args: list[Any]) -> None:
    args[6].fill_(-1)


def _case(name: str, tokens: int, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: Any) -> Case:
    given = {
        "tokens": tokens,
        "heads": 16,
        "latent": 512,
        "rope": 64,
        "block_size": 16,
        "neox": False,
        **dims,
    }
    return Case(name, given, dtype, weight, tags=(tag,))


SPEC = OpSpec(
    name="mla_rope_store",
    level=1,
    reference=reference,
    op=mla_rope_store,
    cases=(
        _case("decode_1", 1, "model", weight=27),
        _case("decode_32", 32, "model", weight=27),
        _case("deepseek_32", 32, "model", weight=61, heads=128, cast=False, cache="float32"),
        _case("prefill_8k", 8192, "model"),
        _case("one", 1, "odd", "float32", heads=1, latent=1, rope=2, block_size=1),
        _case("odd_63", 63, "odd", heads=3, latent=40, rope=6),
        _case("table_17", 17, "odd", heads=5, latent=96, rope=24, block_size=7, padded=3, cast=False, cache="float32"),
        _case("int32_slots", 5, "odd", "float16", heads=40, latent=72, slots="int32", blocks=7, neox=True),
        _case("fp8", 17, "odd", "float8_e4m3fn", heads=2, latent=96, rope=24, block_size=7, padded=3, scale=0.5),
    ),
    arguments=(
        Tensor("positions", "tokens", "positions", values=cases.random_positions),
        Tensor("query", "tokens heads rope", "kv_dtype"),
        Tensor("latent", "tokens latent+rope", "kv_dtype"),
        Tensor("weight", "latent", "kv_dtype", mean=1, std=0.1),
        Tensor(
            "kv_cache", "blocks block_size latent+rope", mutated=True,
            bytes="stored * (latent + rope) * itemsize(dtype)",
        ),
        Tensor(
            "rotated", "tokens heads rope", "kv_dtype", mutated=True, bytes="tokens * heads * rope * itemsize(kv_dtype)"
        ),
        Tensor("slot_mapping", "tokens", "slots", values=random_slots),
        Tensor(
            "cos_sin_cache", "max_positions rope", "cache", values=cases.table,
            bytes="distinct * rope * itemsize(cache)",
        ),
        Scalar("is_neox_style", "neox"),
        Scalar("cast_cache", "cast"),
        Scalar("eps", default=1e-6),
        Scalar("k_scale", "scale", default=1.0),
    ),
    axes={
        **{name: axis for name, axis in cases.AXES.items() if name not in ("head_size", "rotary_dim")},
        **{name: axis for name, axis in CACHE_AXES.items() if name not in ("kv_heads", "scales")},
        "latent": Axis.width(), "rope": Axis.width(), "cast": Axis.option(True),
        "cache": Axis.dtype(Expr("kv_dtype")),
    },
    constraints=("rope % 2 == 0",),
    values=_values,
    flops="tokens * (3 * (heads + 1) * rope + 4 * latent)",
    extremes={"all_padding": _all_padding, "large": _large},
    activations=("query", "latent"),
    stands_for=("rms_norm", "rotary_emb", "concat_and_cache_mla"),
    # e4m3 has three bits of fraction: half a step, and values are rounded before.
    tolerance={**TOLERANCE, "float8_e4m3fn": Tolerance(2**-9, 0.066)},
)  # fmt: skip
