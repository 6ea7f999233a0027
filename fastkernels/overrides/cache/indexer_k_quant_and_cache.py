"""Quantize a step's index keys (DeepSeek-V3.2) to FP8, one scale a key, into the paged cache, in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.cache.store_kvcache import CACHE_AXES, random_slots
from fastkernels.overrides.kit.fp8 import (
    FP8,
    fp8_inverse,
    fp8_refusal,
    fp8_scale,
    quantized,
    scales_of,
    to_fp8,
)
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MIN_ABSMAX = 1e-4  # least absolute maximum of a key, as in DeepSeek's and vLLM's code


def reference(
    k: torch.Tensor, kv_cache: torch.Tensor, k_scales: torch.Tensor, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k: [T, D]; kv_cache: [blocks, block_size, D] float8_e4m3fn; k_scales: [blocks, block_size] float32.

    slot_mapping: [T] int64 or int32: token t goes to block slot // block_size, offset slot % block_size; tokens with a
    negative slot (padding) are not stored. A key's scale is the least power of two with which its values are within
    +-448; the cache holds the key divided by it. Returns new (kv_cache, k_scales).
    """
    kv_cache, k_scales = kv_cache.clone(), k_scales.clone()
    store_in_place(k, kv_cache, k_scales, slot_mapping)
    return kv_cache, k_scales


@triton.jit
def _store_kernel(
    k_ptr, cache_ptr, scale_ptr, slot_ptr, k_stride, cache_stride_b, cache_stride_s, scale_stride_b, block_size, D,
    min_absmax, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        block, offset, at = slot // block_size, slot % block_size, tl.arange(0, BLOCK)
        k = tl.load(k_ptr + token * k_stride + at, mask=at < D, other=0.0).to(tl.float32)
        scale = fp8_scale(tl.max(tl.abs(k)), min_absmax, True)
        to = cache_ptr + block * cache_stride_b + offset * cache_stride_s + at
        tl.store(to, to_fp8(k * fp8_inverse(scale)), mask=at < D)
        tl.store(scale_ptr + block * scale_stride_b + offset, scale)


def _check(k: torch.Tensor, kv_cache: torch.Tensor, k_scales: torch.Tensor, slots: torch.Tensor) -> None:
    if k.dim() != 2 or kv_cache.dim() != 3 or kv_cache.shape[2] != k.shape[1]:
        raise ValueError(
            "indexer_k_quant_and_cache: k must be [T, D] and kv_cache [blocks, block_size, D], got"
            f" {tuple(k.shape)} and {tuple(kv_cache.shape)}"
        )
    if k_scales.shape != kv_cache.shape[:2]:
        raise ValueError(
            f"indexer_k_quant_and_cache: k_scales must be [blocks, block_size] = {tuple(kv_cache.shape[:2])}, got"
            f" {tuple(k_scales.shape)}"
        )
    if slots.shape != (len(k),):
        raise ValueError(
            f"indexer_k_quant_and_cache: slot_mapping has shape {tuple(slots.shape)}, expected ({len(k)},)"
        )


def _supports_triton(
    k: torch.Tensor, kv_cache: torch.Tensor, k_scales: torch.Tensor, slot_mapping: torch.Tensor
) -> str | None:
    if kv_cache.dtype != FP8 or k_scales.dtype != torch.float32:
        return f"the cache is {kv_cache.dtype} with scales in {k_scales.dtype}, not {FP8} and torch.float32"
    for name, t in (("k", k), ("kv_cache", kv_cache), ("k_scales", k_scales), ("slot_mapping", slot_mapping)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return fp8_refusal(k.device)


def _triton(
    k: torch.Tensor, kv_cache: torch.Tensor, k_scales: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    _check(k, kv_cache, k_scales, slot_mapping)
    if len(k) == 0:
        return
    launch_kernel(
        _store_kernel, (len(k),), k, kv_cache, k_scales, slot_mapping, k.stride(0), *kv_cache.stride()[:2],
        k_scales.stride(0), kv_cache.shape[1], k.shape[1], MIN_ABSMAX, BLOCK=next_power_of_2(k.shape[1]), num_warps=1,
    )  # fmt: skip


def store_in_place(
    k: torch.Tensor, kv_cache: torch.Tensor, k_scales: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    _check(k, kv_cache, k_scales, slot_mapping)
    slots = slot_mapping.long()
    used = slots >= 0
    if not used.all():
        k, slots = k[used], slots[used]
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    scales = scales_of(k.abs().amax(dim=1), MIN_ABSMAX, True)
    values = quantized(k, scales[:, None])
    at = slots // kv_cache.shape[1], slots % kv_cache.shape[1]
    if kv_cache.dtype == FP8:  # PyTorch does not index fp8 on every device
        kv_cache, values = kv_cache.view(torch.uint8), values.to(FP8).view(torch.uint8)
    kv_cache[at] = values.to(kv_cache.dtype)
    k_scales[at] = scales.to(k_scales.dtype)


indexer_k_quant_and_cache = define(
    "indexer_k_quant_and_cache(Tensor k, Tensor(a!) kv_cache, Tensor(b!) k_scales, Tensor slot_mapping) -> ()",
    fake=lambda *args, **kwargs: None,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", store_in_place, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Keys of different magnitudes."""
    factors = call.randn(call["tokens"], 1).exp2()
    return {
        "k": (call.randn(call["tokens"], call["head_size"]) * factors).to(getattr(torch, call["kv_dtype"]))
    }


def _all_padding(args: list[Any]) -> None:
    args[3].fill_(-1)


def _zero_key(args: list[Any]) -> None:
    args[0][0] = 0


def _large(args: list[Any]) -> None:
    args[0].mul_(1024)


def _case(name: str, tokens: int, tag: str, weight: float = 1, **dims: Any) -> Case:
    given = {"tokens": tokens, "head_size": 128, "block_size": 64, **dims}
    return Case(name, given, "float8_e4m3fn", weight, tags=(tag,))


SPEC = OpSpec(
    name="indexer_k_quant_and_cache",
    level=1,
    reference=reference,
    op=indexer_k_quant_and_cache,
    cases=(
        _case("decode_1", 1, "model", weight=61, kv_dtype="bfloat16"),
        _case("decode_32", 32, "model", weight=61, kv_dtype="bfloat16"),
        _case("prefill_8k", 8192, "model", kv_dtype="bfloat16"),
        _case("one", 1, "odd", kv_dtype="float32", head_size=1, block_size=1),
        _case("odd_63", 63, "odd", kv_dtype="bfloat16", head_size=40, block_size=16),
        _case("int32_slots", 5, "odd", head_size=24, block_size=32, slots="int32", blocks=7),
        _case("half", 33, "odd", kv_dtype="float16", head_size=80, block_size=5),
        _case("padded", 17, "odd", kv_dtype="float32", head_size=96, block_size=5, padded=3),
    ),
    arguments=(
        Tensor("k", "tokens head_size", "kv_dtype", bytes="stored * head_size * itemsize(kv_dtype)"),
        Tensor("kv_cache", "blocks block_size head_size", mutated=True, bytes="stored * head_size"),
        Tensor("k_scales", "blocks block_size", "float32", mutated=True, bytes="4 * stored"),
        Tensor("slot_mapping", "tokens", "slots", bytes="8 * tokens", values=random_slots),
    ),
    axes={
        "tokens": Axis.per_call(), "head_size": Axis.width(),
        **{name: axis for name, axis in CACHE_AXES.items() if name not in ("kv_heads", "scales")},
    },
    values=_values,
    extremes={"all_padding": _all_padding, "zero_key": _zero_key, "large": _large},
    activations=("k",),
    flops="0",
    # e4m3 has three bits of fraction, and steps of 2^-9 near zero.
    tolerance={"float8_e4m3fn": Tolerance(2**-10, 2**-4)},
    batch_invariant=True,  # each key by itself
)  # fmt: skip
