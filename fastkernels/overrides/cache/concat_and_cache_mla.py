"""Write a step's latents and rotary keys into the paged cache of multi-head latent attention, in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.cache.store_kvcache import CACHE_AXES, random_slots, round_e4m3
from fastkernels.overrides.kit.fp8 import fp8_refusal
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel


def reference(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """kv_c: [T, R]; k_pe: [T, P]; kv_cache: [blocks, block_size, R + P]; slot_mapping: [T] int64 or int32.

    Token t goes to block slot // block_size, offset slot % block_size; tokens with a negative slot (padding) are not
    stored. The cache holds the values divided by scale; float8_e4m3fn saturates at +-448. Returns a new kv_cache.
    """
    kv_cache = kv_cache.clone()
    store_in_place(kv_c, k_pe, kv_cache, slot_mapping, scale)
    return kv_cache


@triton.jit
def _store_kernel(
    c_ptr, p_ptr, cache_ptr, slot_ptr, c_stride, p_stride, cache_stride_b, cache_stride_s, block_size, R, P, scale,
    FP8: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        at = tl.arange(0, BLOCK)
        c = tl.load(c_ptr + token * c_stride + at, mask=at < R, other=0.0)
        p = tl.load(p_ptr + token * p_stride + at - R, mask=(at >= R) & (at < R + P), other=0.0)
        x = tl.where(at < R, c, p)
        if FP8:
            x = round_e4m3(x.to(tl.float32) / scale)
        to = cache_ptr + slot // block_size * cache_stride_b + slot % block_size * cache_stride_s + at
        tl.store(to, x.to(cache_ptr.dtype.element_ty), mask=at < R + P)


def _check(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    if kv_c.dim() != 2 or k_pe.dim() != 2 or len(kv_c) != len(k_pe):
        raise ValueError(
            f"concat_and_cache_mla: kv_c and k_pe must be [T, R] and [T, P], got {tuple(kv_c.shape)} and"
            f" {tuple(k_pe.shape)}"
        )
    if slot_mapping.shape != (len(kv_c),):
        raise ValueError(
            f"concat_and_cache_mla: slot_mapping has shape {tuple(slot_mapping.shape)}, expected ({len(kv_c)},)"
        )
    if kv_cache.dim() != 3 or kv_cache.shape[2] != kv_c.shape[1] + k_pe.shape[1]:
        raise ValueError(
            f"concat_and_cache_mla: kv_cache {tuple(kv_cache.shape)} is not [blocks, block_size,"
            f" {kv_c.shape[1] + k_pe.shape[1]}]"
        )


def _supports_triton(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, scale: float = 1.0
) -> str | None:  # fmt: skip
    named = (("kv_c", kv_c), ("k_pe", k_pe), ("kv_cache", kv_cache), ("slot_mapping", slot_mapping))
    for name, t in named:
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    if kv_cache.dtype == torch.float8_e4m3fn:
        return fp8_refusal(kv_c.device)
    return None if scale == 1.0 else f"scale {scale} is for fp8 caches, this is {kv_cache.dtype}"


def _triton(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, scale: float = 1.0
) -> None:  # fmt: skip
    _check(kv_c, k_pe, kv_cache, slot_mapping)
    if len(kv_c) == 0:
        return
    rank, rope = kv_c.shape[1], k_pe.shape[1]
    launch_kernel(
        _store_kernel, (len(kv_c),), kv_c, k_pe, kv_cache, slot_mapping, kv_c.stride(0), k_pe.stride(0),
        *kv_cache.stride()[:2], kv_cache.shape[1], rank, rope, scale, FP8=kv_cache.dtype == torch.float8_e4m3fn,
        BLOCK=next_power_of_2(rank + rope), num_warps=4,
    )  # fmt: skip


def store_in_place(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, scale: float = 1.0
) -> None:  # fmt: skip
    _check(kv_c, k_pe, kv_cache, slot_mapping)
    new, slots = torch.cat((kv_c, k_pe), dim=1), slot_mapping.long()
    used = slots >= 0
    if not used.all():
        new, slots = new[used], slots[used]
    new = new if scale == 1.0 else new.to(torch.promote_types(new.dtype, torch.float32)) / scale
    if kv_cache.dtype == torch.float8_e4m3fn:
        new = new.clamp(-448.0, 448.0).to(kv_cache.dtype).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = new.to(kv_cache.dtype)


concat_and_cache_mla = define(
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, float scale=1.0) -> ()",
    fake=lambda *args, **kwargs: None,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", store_in_place, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Slice both from one packed tensor, as models do."""
    packed = call.randn(call["tokens"], call["latent"] + call["rope"]).to(getattr(torch, call["kv_dtype"]))
    return dict(zip(("kv_c", "k_pe"), packed.split([call["latent"], call["rope"]], dim=-1), strict=True))


def _all_padding(args: list[Any]) -> None:
    args[3].fill_(-1)


def _large(args: list[Any]) -> None:
    for t in args[:2]:
        t.mul_(32)


def _case(name: str, tokens: int, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: Any) -> Case:
    given = {"tokens": tokens, "latent": 512, "rope": 64, "block_size": 64, **dims}
    return Case(name, given, dtype, weight, tags=(tag,))


_EXACT = Tolerance(0.0, 0.0)
_STORED = "stored * {} * itemsize(kv_dtype)"
SPEC = OpSpec(
    name="concat_and_cache_mla",
    level=1,
    reference=reference,
    op=concat_and_cache_mla,
    cases=(
        _case("decode_1", 1, "model", weight=61),
        _case("decode_32", 32, "model", weight=61),
        _case("prefill_8k", 8192, "model"),
        _case("one", 1, "odd", "float32", latent=1, rope=1, block_size=1),
        _case("odd_63", 63, "odd", latent=40, rope=6, block_size=16),
        _case("int32_slots", 5, "odd", "float16", block_size=32, slots="int32", blocks=7),
        _case("padded", 17, "odd", latent=96, rope=24, block_size=7, padded=3),
        _case("fp8", 17, "odd", "float8_e4m3fn", latent=96, rope=24, block_size=7, padded=3, scale=0.5),
    ),
    arguments=(
        Tensor("kv_c", "tokens latent", "kv_dtype", bytes=_STORED.format("latent")),
        Tensor("k_pe", "tokens rope", "kv_dtype", bytes=_STORED.format("rope")),
        Tensor(
            "kv_cache", "blocks block_size latent+rope", mutated=True,
            bytes="stored * (latent + rope) * itemsize(dtype)",
        ),
        Tensor("slot_mapping", "tokens", "slots", bytes="8 * tokens", values=random_slots),
        Scalar("scale", default=1.0),
    ),
    axes={
        "tokens": Axis.per_call(), "latent": Axis.width(), "rope": Axis.width(),
        **{name: axis for name, axis in CACHE_AXES.items() if name not in ("kv_heads", "scales")},
    },
    values=_values,
    extremes={"all_padding": _all_padding, "large": _large},
    activations=("kv_c", "k_pe"),
    flops="0",
    # e4m3 has three bits of fraction, and steps of 2^-9 near zero.
    tolerance={
        "float32": _EXACT,
        "float16": _EXACT,
        "bfloat16": _EXACT,
        "float8_e4m3fn": Tolerance(2**-10, 2**-4),
    },
    batch_invariant=True,  # a copy
)  # fmt: skip
