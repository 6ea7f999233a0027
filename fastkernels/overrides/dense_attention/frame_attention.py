"""Attention of a world model's patches along time, with a cache of frames: rotation, cache, softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

MOST = 64 * 128  # numbers of keys that a program holds in registers


def reference(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor, places: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """qkv: [B, F, P, 3, H, D] of F new frames; caches: [S, W, P, H, D]; cos, sin: [W, D]; slots, places: [B] int64.

    Frame f of row b has the position places[b] + f, which turns channels 2j and 2j + 1 of its query and key. Its key
    and value go to that place of slots[b], and it sees the places up to its own, at the same patch. Slots differ.
    Returns [B, F, P, H, D], key_cache and value_cache.
    """
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    out = _attend(qkv, cos, sin, key_cache, value_cache, slots, places, scale)
    return out, key_cache, value_cache


def _attend(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor, places: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Compute the op in at least float32, and write to the caches."""
    acc = torch.promote_types(qkv.dtype, torch.float32)
    at = places[:, None] + torch.arange(qkv.shape[1], device=qkv.device)  # [B, F]
    turns = cos.to(acc)[at][:, :, None, None], sin.to(acc)[at][:, :, None, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        wide = x.to(acc)
        near = torch.stack((-wide[..., 1::2], wide[..., ::2]), dim=-1).flatten(-2)
        return (wide * turns[0] + near * turns[1]).to(x.dtype)

    q, k, v = turned(qkv[:, :, :, 0]), turned(qkv[:, :, :, 1]), qkv[:, :, :, 2]
    key_cache[slots[:, None], at], value_cache[slots[:, None], at] = k, v
    visible = torch.arange(key_cache.shape[1], device=qkv.device) <= at[..., None]  # [B, F, W]
    keys, values = key_cache[slots].to(acc), value_cache[slots].to(acc)
    # Places that no frame of a row sees may hold anything.
    values = values.masked_fill(~visible[:, -1, :, None, None, None], 0.0)
    scores = torch.einsum("bfphd,bwphd->bphfw", q.to(acc), keys) * scale
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bphfw,bwphd->bfphd", weights, values).to(qkv.dtype).contiguous()


@triton.jit
def _turned(row, at, cols, cos, sin, mask):
    # The row and its neighbours within pairs: the second load is of lines that the first has brought.
    x = tl.load(row + at + cols, mask=mask, other=0.0)
    near = tl.load(row + at + (cols ^ 1), mask=mask, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * cos + tl.where(cols % 2 == 0, -near, near) * sin).to(x.dtype)


@triton.jit(do_not_specialize=["F"])
def _frame_attention_kernel(
    qkv_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, slot_ptr, place_ptr, out_ptr, F, P, H, D, W, scale,
    x_b, x_f, x_p, x_part, x_h, k_s, k_w, k_p, k_h, v_s, v_w, v_p, v_h,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per (row, patch, head): it holds all keys and values of that patch, old and new.
    follow(OVERLAP)
    LOG2E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0).to(tl.int64)
    head, patch, batch = pid % H, pid // H % P, pid // (H * P)
    slot, place = tl.load(slot_ptr + batch).to(tl.int64), tl.load(place_ptr + batch).to(tl.int32)
    rows, cols = tl.arange(0, BLOCK_W)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = cols < D
    old, new = (
        (rows < place) & (rows < W) & inside,
        (rows >= place) & (rows < place + F) & (rows < W) & inside,
    )
    x_ptr = qkv_ptr + batch * x_b + patch * x_p + head * x_h
    frame = (rows - place).to(tl.int64) * x_f
    cos = tl.load(cos_ptr + rows * D + cols, mask=new, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + rows * D + cols, mask=new, other=0.0).to(tl.float32)
    k_new = _turned(x_ptr + x_part, frame, cols, cos, sin, new)
    v_new = tl.load(x_ptr + 2 * x_part + frame + cols, mask=new, other=0.0)
    k_at = k_ptr + slot * k_s + patch * k_p + head * k_h + rows.to(tl.int64) * k_w + cols
    v_at = v_ptr + slot * v_s + patch * v_p + head * v_h + rows.to(tl.int64) * v_w + cols
    keys = tl.where(new, k_new, tl.load(k_at, mask=old, other=0.0)).to(tl.float32)
    values = tl.where(new, v_new, tl.load(v_at, mask=old, other=0.0)).to(tl.float32)
    tl.store(k_at, k_new, mask=new)
    tl.store(v_at, v_new, mask=new)
    all_rows = tl.arange(0, BLOCK_W)
    for f in range(0, F):
        at = place + f
        if at < W:
            q_cos = tl.load(cos_ptr + at * D + cols, mask=inside, other=0.0).to(tl.float32)
            q_sin = tl.load(sin_ptr + at * D + cols, mask=inside, other=0.0).to(tl.float32)
            q = _turned(x_ptr, f * x_f, cols, q_cos, q_sin, inside).to(tl.float32)
            scores = tl.sum(keys * q, axis=1) * (scale * LOG2E)
            scores = tl.where(all_rows <= at, scores, float("-inf"))
            weights = tl.exp2(scores - tl.max(scores, axis=0))
            found = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
            out = out_ptr + ((batch * F + f) * P + patch) * H * D + head * D
            tl.store(out + cols, found[None, :].to(out_ptr.dtype.element_ty), mask=inside)


def _check(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor, places: torch.Tensor,
) -> None:  # fmt: skip
    shape, cache = tuple(qkv.shape), tuple(key_cache.shape)
    if len(shape) != 6 or shape[3] != 3 or shape[5] % 2:
        raise ValueError(f"frame_attention: qkv must be [B, F, P, 3, H, D] with an even D, got {shape}")
    if len(cache) != 5 or cache[2:] != (shape[2], *shape[4:]) or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"frame_attention: caches {cache} and {tuple(value_cache.shape)} are not [S, W, P, H, D] of qkv {shape}"
        )
    if shape[1] > cache[1]:
        raise ValueError(f"frame_attention: {shape[1]} frames are more than the {cache[1]} of the cache")
    if tuple(cos.shape) != (cache[1], shape[5]) or sin.shape != cos.shape:
        raise ValueError(f"frame_attention: cos {tuple(cos.shape)}, sin {tuple(sin.shape)} are not [W, D]")
    if slots.shape != (shape[0],) or places.shape != slots.shape:
        raise ValueError(
            f"frame_attention: slots {tuple(slots.shape)}, places {tuple(places.shape)} are not [{shape[0]}]"
        )


def _supports_triton(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    *_: object,
) -> str | None:  # fmt: skip
    if qkv.dtype not in FLOATS:
        return f"qkv is {qkv.dtype}"
    if not qkv.dtype == key_cache.dtype == value_cache.dtype:
        return f"qkv is {qkv.dtype}, the caches are {key_cache.dtype} and {value_cache.dtype}"
    if any(t.stride(-1) != 1 for t in (qkv, key_cache, value_cache)):
        return "the last dimension of qkv or of a cache is not contiguous"
    if not (cos.is_contiguous() and sin.is_contiguous()):
        return "cos or sin is not contiguous"
    held = next_power_of_2(max(key_cache.shape[1], 1)) * next_power_of_2(qkv.shape[5])
    return f"{key_cache.shape[1]} frames of {qkv.shape[5]} channels do not fit" if held > MOST else None


def _fake(qkv: torch.Tensor, *_: object) -> torch.Tensor:
    return qkv.new_empty((*qkv.shape[:3], *qkv.shape[4:]))


def _triton(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor, places: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    _check(qkv, cos, sin, key_cache, value_cache, slots, places)
    out = _fake(qkv)
    if out.numel() == 0:
        return out
    batch, frames, patches, heads, size = out.shape
    window = key_cache.shape[1]
    launch_kernel(
        _frame_attention_kernel, (batch * patches * heads,),
        qkv, cos, sin, key_cache, value_cache, slots, places, out, frames, patches, heads, size, window, scale,
        *qkv.stride()[:5], *key_cache.stride()[:4], *value_cache.stride()[:4],
        BLOCK_W=next_power_of_2(window), BLOCK_D=next_power_of_2(size), num_warps=2 if window <= 16 else 4,
    )  # fmt: skip
    return out


def _reference(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slots: torch.Tensor, places: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    _check(qkv, cos, sin, key_cache, value_cache, slots, places)
    return _attend(qkv, cos, sin, key_cache, value_cache, slots, places, scale)


frame_attention = define(
    "frame_attention(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots,"
    " Tensor places, float scale) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _slots(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randperm(call["slots"], generator=call.generator, device=call.device)[: shape[0]].to(dtype)


def _places(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (call.rand(*shape) * (call["window"] - call["frames"] + 1)).floor().to(dtype)


def _angles(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of times [window, head_size], as the model has them."""
    size = call["head_size"]
    steps = 10000.0 ** -(torch.arange(0, size, 2, device=call.device) / size)
    angles = torch.arange(call["window"], device=call.device)[:, None] * steps.repeat_interleave(2)
    return angles.cos(), angles.sin()


def _case(name: str, tag: str, batch: int, frames: int, tokens: int, heads: int, head_size: int, window: int,
          dtype: str = "float16", weight: float = 1) -> Case:  # fmt: skip
    sizes = {"batch": batch, "frames": frames, "tokens": tokens, "heads": heads, "head_size": head_size}
    return Case(name, {**sizes, "window": window, "slots": batch + 1}, dtype, weight, (tag,))


_CACHE = "slots window tokens heads head_size"
_SEEN = "batch * window * tokens * heads * head_size * itemsize(dtype)"

SPEC = OpSpec(
    name="frame_attention",
    level=2,
    reference=reference,
    op=frame_attention,
    cases=(  # Oasis 500M at 360 x 640: one frame of 1 to 32 requests, and a window that is computed again
        _case("oasis", "model", 1, 1, 144, 16, 64, 32, weight=64),
        _case("oasis_8", "model", 8, 1, 144, 16, 64, 32, weight=64),
        _case("oasis_32", "model", 32, 1, 144, 16, 64, 32, weight=16),
        _case("oasis_window", "model", 1, 31, 144, 16, 64, 32, weight=1),
        _case("one", "odd", 1, 1, 1, 1, 2, 1, "float32"),
        _case("odd_63", "odd", 2, 1, 7, 3, 16, 5, "float32"),
        _case("frames_3", "odd", 3, 3, 5, 2, 8, 7, "float32"),
        _case("whole_window", "odd", 2, 4, 3, 2, 6, 4, "float32"),
        _case("half", "odd", 2, 2, 9, 1, 64, 9),
        _case("odd_129", "odd", 1, 2, 129, 1, 10, 3, "bfloat16"),
        _case("wide", "odd", 1, 1, 3, 2, 128, 33, "bfloat16"),
        _case("rows_5", "odd", 5, 1, 2, 2, 32, 17),
    ),
    arguments=(
        Tensor("qkv", "batch frames tokens parts heads head_size"),
        Tensor("cos", "window head_size", "float32", values=lambda call, *_: _angles(call)[0]),
        Tensor("sin", "window head_size", "float32", values=lambda call, *_: _angles(call)[1]),
        Tensor("key_cache", _CACHE, mutated=True, bytes=_SEEN),
        Tensor("value_cache", _CACHE, mutated=True, bytes=_SEEN),
        Tensor("slots", "batch", "int64", values=_slots),
        Tensor("places", "batch", "int64", values=_places),
        Scalar("scale"),
    ),
    outputs=(Tensor("out", "batch frames tokens heads head_size"),),
    axes={
        "batch": Axis.per_call(),
        "frames": Axis.per_call(),
        "tokens": Axis.per_call(),
        "parts": Axis(lambda s: 3),
        "heads": Axis.count(),
        "head_size": Axis.width(),
        "window": Axis.count(),
        "slots": Axis.count(),
        "scale": Axis(lambda s: s["head_size"] ** -0.5),
    },
    constraints=("frames <= window", "batch <= slots", "head_size % 2 == 0"),
    flops="4 * batch * frames * window * tokens * heads * head_size",
    activations=("qkv",),
)
