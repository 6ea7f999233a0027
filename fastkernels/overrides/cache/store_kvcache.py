"""Write a step's keys and values into the paged KV cache, in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.forward_context import once_per_step
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.cache import store_kvcache_cpp
from fastkernels.overrides.kit.fp8 import fp8_refusal
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """key, value: [T, Hkv, D]; caches: [blocks, block_size, Hkv, D]; slot_mapping: [T] int64 or int32.

    Token t goes to block slot // block_size, offset slot % block_size; tokens with a negative slot (padding) are not
    stored. The cache holds key / k_scale and value / v_scale; float8_e4m3fn saturates at +-448.
    Returns new (key_cache, value_cache).
    """
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    store_in_place(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    return key_cache, value_cache


@triton.jit
def round_e4m3(x):
    # Rounds to the nearest e4m3 value, ties to even, in float32. The cast is exact then, also in the interpreter, whose
    # own rounding loses the carry into the exponent.
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # 1.5 * 2^14: float32 has steps of 2^-9 there, like e4m3 below 2^-6
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@triton.jit
def _store_kvcache_kernel(
    k_ptr, v_ptr, kc_ptr, vc_ptr, slot_ptr, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    kc_stride_b, kc_stride_s, kc_stride_h, vc_stride_b, vc_stride_s, vc_stride_h, block_size, n_heads, D,
    k_scale, v_scale, FP8: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // block_size, slot % block_size
        heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        dims = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < n_heads) & (dims < D)
        k = tl.load(k_ptr + token * k_stride_t + heads * k_stride_h + dims, mask=mask, other=0.0)
        v = tl.load(v_ptr + token * v_stride_t + heads * v_stride_h + dims, mask=mask, other=0.0)
        if FP8:
            k, v = round_e4m3(k.to(tl.float32) / k_scale), round_e4m3(v.to(tl.float32) / v_scale)
        kc_at = kc_ptr + block * kc_stride_b + offset * kc_stride_s + heads * kc_stride_h + dims
        vc_at = vc_ptr + block * vc_stride_b + offset * vc_stride_s + heads * vc_stride_h + dims
        tl.store(kc_at, k.to(kc_ptr.dtype.element_ty), mask=mask)
        tl.store(vc_at, v.to(vc_ptr.dtype.element_ty), mask=mask)


def check(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    if key.dim() != 3 or key.shape != value.shape:
        raise ValueError(
            f"store_kvcache: key and value must be [T, Hkv, D] alike, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if slot_mapping.shape != (key.shape[0],):
        raise ValueError(
            f"store_kvcache: slot_mapping has shape {tuple(slot_mapping.shape)}, expected ({key.shape[0]},)"
        )
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape or key_cache.shape[2:] != key.shape[1:]:
        raise ValueError(
            f"store_kvcache: caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} are not"
            f" [blocks, block_size, {key.shape[1]}, {key.shape[2]}]"
        )


def _supports_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> str | None:
    named = (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache))
    for name, t in (*named, ("slot_mapping", slot_mapping)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    if key_cache.dtype == torch.float8_e4m3fn:
        return fp8_refusal(key.device)
    if (k_scale, v_scale) != (1.0, 1.0):
        return f"k_scale {k_scale} and v_scale {v_scale} are for fp8 caches, these are {key_cache.dtype}"
    return None


def _triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    check(key, value, key_cache, value_cache, slot_mapping)
    tokens, heads, d = key.shape
    if key.numel() == 0:
        return
    block_d = next_power_of_2(d)
    block_h = min(next_power_of_2(heads), max(1, 2048 // block_d))
    grid = (tokens, cdiv(heads, block_h))
    launch_kernel(
        _store_kvcache_kernel, grid,
        key, value, key_cache, value_cache, slot_mapping, *key.stride()[:2], *value.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], key_cache.shape[1], heads, d, k_scale, v_scale,
        FP8=key_cache.dtype == torch.float8_e4m3fn, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def _used_slots(slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slots without padding, and which tokens they belong to; None: to all."""
    used = slot_mapping >= 0
    if used.all():
        return slot_mapping.long(), None
    return slot_mapping[used].long(), used


def store_in_place(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    _store(key, value, key_cache, value_cache, slot_mapping, _used_slots(slot_mapping), k_scale, v_scale)


def _once_per_step(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Do what store_in_place does; the layers of a step find the used slots once."""
    used = once_per_step(_used_slots, slot_mapping)
    _store(key, value, key_cache, value_cache, slot_mapping, used, k_scale, v_scale)


def _store(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor | None], k_scale: float, v_scale: float,
) -> None:  # fmt: skip
    check(key, value, key_cache, value_cache, slot_mapping)
    slots, used = found
    if used is not None:
        key, value = key[used], value[used]
    block_size = key_cache.shape[1]
    for new, target, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        new = new if scale == 1.0 else new.to(torch.promote_types(new.dtype, torch.float32)) / scale
        if target.dtype == torch.float8_e4m3fn:
            new = new.clamp(-448.0, 448.0).to(target.dtype).view(torch.uint8)
            target = target.view(torch.uint8)
        if target.is_contiguous():
            target.view(-1, *target.shape[2:]).index_copy_(0, slots, new.to(target.dtype))
        else:
            target[slots // block_size, slots % block_size] = new.to(target.dtype)


def _cpp(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    args = (key, value, key_cache, value_cache, slot_mapping)
    if store_kvcache_cpp.unsupported(*args, k_scale, v_scale):
        _once_per_step(*args, k_scale, v_scale)
        return
    check(*args)
    store_kvcache_cpp.store(*args)


store_kvcache = define(
    "store_kvcache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping,"
    " float k_scale=1.0, float v_scale=1.0) -> ()",
    fake=lambda *args, **kwargs: None,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("cpp", _cpp, devices=("cpu",), missing=store_kvcache_cpp.missing),
        Provider("reference", _once_per_step, devices=("cuda", "cpu")),
    ),
)


CACHE_SHAPE = "blocks block_size kv_heads head_size"
# Axes of a step's keys, values and slots, and of the paged cache
CACHE_AXES: dict[str, Axis] = {
    "kv_heads": Axis.count(),
    "block_size": Axis.option(choices=(1, 5, 16, 32, 64)),
    "blocks": Axis(Expr("cdiv(tokens, block_size) + 3"), stated=True),
    "kv_dtype": Axis.dtype(Expr("'float16' if dtype == 'float8_e4m3fn' else dtype")),
    "slots": Axis.dtype("int64"),
    "padded": Axis.option(0, read=lambda a: _padded(a.slot_mapping)),  # every so many tokens one is padding
    "stored": Axis.counted(
        lambda a: int((a.slot_mapping >= 0).sum()), Expr("tokens - (cdiv(tokens, padded) if padded else 0)")
    ),
    "scales": Axis.option((1.0, 1.0)),
}
_STORED = "stored * kv_heads * head_size"


def _padded(slots: torch.Tensor) -> int | None:
    missing = int((slots < 0).sum())
    return -(-len(slots) // missing) if missing else None


def random_slots(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a slot of its own for each token, and -1 for padding."""
    count = call["blocks"] * call["block_size"]
    slots = torch.randperm(count, generator=call.generator, device=call.device)[: shape[0]].to(dtype)
    if call["padded"]:
        slots[:: call["padded"]] = -1
    return slots


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Slice key and value from one packed tensor, as models do."""
    heads, size = call["kv_heads"], call["head_size"]
    kv = call.randn(call["tokens"], 2 * heads * size).to(getattr(torch, call["kv_dtype"]))
    key, value = (t.view(-1, heads, size) for t in kv.split(heads * size, dim=-1))
    return {"key": key, "value": value}


def _large(args: list[Any], factor: float = 64.0) -> None:
    """Scale values up, within the range of an fp8 cache: the float64 reference does not saturate."""
    fp8 = args[2].dtype == torch.float8_e4m3fn
    for t in args[:2]:
        t.mul_(min(factor, 32.0) if fp8 else factor)


def _outlier(args: list[Any]) -> None:
    for t in args[:2]:
        t[-1, -1, -1] = 200.0 if args[2].dtype == torch.float8_e4m3fn else 1000.0


def _all_padding(args: list[Any]) -> None:
    args[4].fill_(-1)


def _one_token(args: list[Any]) -> None:
    args[4][1:] = -1


_LLAMA = {"kv_heads": 8, "head_size": 128, "block_size": 16}
_EXACT = Tolerance(0.0, 0.0)
SPEC = OpSpec(
    name="store_kvcache",
    level=1,
    reference=reference,
    op=store_kvcache,
    cases=(
        Case("decode_1", {"tokens": 1, **_LLAMA}, weight=32, tags=("model",)),
        Case("decode_32", {"tokens": 32, **_LLAMA}, weight=32, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, **_LLAMA}, weight=1, tags=("model",)),
        Case(
            "one",
            {"tokens": 1, "kv_heads": 1, "head_size": 1, "block_size": 1},
            dtype="float32",
            tags=("odd",),
        ),
        Case("odd_63", {"tokens": 63, "kv_heads": 3, "head_size": 64, "block_size": 16}, tags=("odd",)),
        Case(
            "int32_slots",
            {"tokens": 5, "kv_heads": 9, "head_size": 80, "block_size": 32, "slots": "int32", "blocks": 7},
            dtype="float16",
            tags=("odd",),
        ),
        Case(
            "half_padding",
            {"tokens": 33, "kv_heads": 1, "head_size": 8, "block_size": 4, "padded": 2},
            tags=("odd",),
        ),
        Case(
            "padded",
            {"tokens": 17, "kv_heads": 5, "head_size": 96, "block_size": 7, "padded": 3},
            tags=("odd",),
        ),
        Case(
            "fp8",
            {
                "tokens": 17,
                "kv_heads": 5,
                "head_size": 96,
                "block_size": 7,
                "padded": 3,
                "scales": (0.5, 0.75),
            },
            dtype="float8_e4m3fn",
            tags=("odd",),
        ),
    ),
    arguments=(
        Tensor("key", "tokens kv_heads head_size", "kv_dtype", bytes=f"{_STORED} * itemsize(kv_dtype)"),
        Tensor("value", "tokens kv_heads head_size", "kv_dtype", bytes=f"{_STORED} * itemsize(kv_dtype)"),
        Tensor("key_cache", CACHE_SHAPE, mutated=True, bytes=f"{_STORED} * itemsize(dtype)"),
        Tensor("value_cache", CACHE_SHAPE, mutated=True, bytes=f"{_STORED} * itemsize(dtype)"),
        Tensor("slot_mapping", "tokens", "slots", bytes="8 * tokens", values=random_slots),
        Scalar("k_scale", dim="scales", index=0),
        Scalar("v_scale", dim="scales", index=1),
    ),
    axes={"tokens": Axis.per_call(), "head_size": Axis.width(), **CACHE_AXES},
    values=_values,
    extremes={"all_padding": _all_padding, "one_token": _one_token, "large": _large, "outlier": _outlier},
    activations=("key", "value"),
    flops="0",
    # e4m3 has three bits of fraction, and steps of 2^-9 near zero.
    tolerance={
        "float32": _EXACT,
        "float16": _EXACT,
        "bfloat16": _EXACT,
        "float8_e4m3fn": Tolerance(2**-10, 2**-4),
    },
    batch_invariant=True,  # a copy
)
