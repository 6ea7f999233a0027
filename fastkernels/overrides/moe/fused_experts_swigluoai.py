"""GPT-OSS's experts: a weighted sum of MLPs with biases and a clamped SwiGLU, y = sum w (W2 act(W1 x + b1) + b2).

Their weights are floats or MXFP4 (arXiv 2508.10925).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Sizes, Tensor, fan_in
from fastkernels.core.tuning import Chip, Key
from fastkernels.overrides.activation import swigluoai_and_mul as swiglu
from fastkernels.overrides.activation.swigluoai_and_mul import ALPHA, LIMIT, swigluoai_and_mul
from fastkernels.overrides.kit import mxfp4
from fastkernels.overrides.moe import fp4_selection
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe import mxfp4_prompt as many
from fastkernels.overrides.moe.biased_gemm import biased_gemm, biased_tiles
from fastkernels.overrides.moe.cases import AXES, FLOPS, ROUTING_BYTES, extremes, per_expert, routing
from fastkernels.overrides.moe.fused_experts import (
    SHAPE,
    SIZES,
    dims_of_key,
    key_of,
    on_own_rows,
    weighted_sum,
)
from fastkernels.overrides.moe.grouped_gemm import sum_over_experts
from fastkernels.overrides.moe.moe_tiles import parsed
from fastkernels.overrides.moe.selection import Call as SizesOfCall
from fastkernels.overrides.routing.sorted_pairs import sort_pairs, sorts

T = torch.Tensor
PROMPT = "prompt"  # the kernel for many rows, mxfp4_prompt.py


def reference(
    hidden_states: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T | None = None,
    w2_scale: T | None = None, expert_map: T | None = None, alpha: float = ALPHA, limit: float = LIMIT,
) -> T:  # fmt: skip
    """hidden_states: [T, H]; w1: [E, 2 I, H], gate and up rows alternate; w2: [E, H, I]; weights and ids: [T, K].

    With scales, w1 [E, 2 I, H / 2] and w2 [E, H, I / 2] are MXFP4, see kit/mxfp4.py. w1_bias: [E, 2 I]; w2_bias:
    [E, H]. expert_map: see fused_experts. Returns [T, H] in hidden_states' dtype.
    """

    def mlp(e: int, x: T) -> T:
        both = x @ _floats(w1, w1_scale, e, x.dtype).t() + w1_bias[e].to(x.dtype)
        inner = swiglu.reference(both, alpha, limit)
        return inner @ _floats(w2, w2_scale, e, x.dtype).t() + w2_bias[e].to(x.dtype)

    return weighted_sum(hidden_states, topk_weights, topk_ids, expert_map, w1.shape[0], mlp)


def _floats(w: T, scale: T | None, expert: int, dtype: torch.dtype) -> T:
    """The matrix of one expert."""
    return w[expert].to(dtype) if scale is None else mxfp4.dequantize(w[expert], scale[expert], dtype)


def _check(
    x: T, w1: T, w2: T, w1_bias: T, w2_bias: T, weights: T, ids: T, w1_scale: T | None, w2_scale: T | None
) -> None:
    """Raise ValueError for tensors that do not match."""
    if (w1_scale is None) != (w2_scale is None):
        raise ValueError("w1_scale and w2_scale must be given together")
    for w, scale in ((w1, w1_scale), (w2, w2_scale)):
        if scale is not None:
            mxfp4.check(w, scale)
    per = 1 if w1_scale is None else 2
    (experts, rows), (tokens, hidden) = w1.shape[:2], x.shape
    wanted = {
        "w1": (w1, (experts, rows, hidden // per)), "w2": (w2, (experts, hidden, rows // 2 // per)),
        "w1_bias": (w1_bias, (experts, rows)), "w2_bias": (w2_bias, (experts, hidden)),
        "topk_weights": (weights, tuple(ids.shape)), "topk_ids": (ids, (tokens, *ids.shape[1:])),
    }  # fmt: skip
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must be {shape}, with hidden_states {tuple(x.shape)} and w1"
                f" {tuple(w1.shape)}"
            )


def _supports_triton(
    hidden_states: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T | None = None,
    *_: Any, **__: Any,
) -> str | None:  # fmt: skip
    if hidden_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {hidden_states.dtype} is not float32, float16 or bfloat16"
    for name, w in (("w1", w1), ("w2", w2)):
        if w1_scale is None and w.dtype != hidden_states.dtype:
            return f"{name} is {w.dtype}, hidden_states {hidden_states.dtype}"
        if w.stride(-1) != 1:
            return f"{name} has strides {tuple(w.stride())}: the last dimension must be contiguous"
        if w1_scale is not None and (w.storage_offset() % 2 or any(s % 2 for s in w.stride()[:-1])):
            return f"{name} has strides {tuple(w.stride())}: MXFP4 values are read in words of two bytes"
    return None


def _triton(
    hidden_states: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T | None = None,
    w2_scale: T | None = None, expert_map: T | None = None, alpha: float = ALPHA, limit: float = LIMIT,
    tiles: str | None = None,
) -> T:  # fmt: skip
    """tiles: of both products, as moe_tiles.py names them; None: the default."""
    _check(hidden_states, w1, w2, w1_bias, w2_bias, topk_weights, topk_ids, w1_scale, w2_scale)
    x, ids, weights = hidden_states.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    if ids.numel() == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    own = biased_tiles(ids.numel() // experts, x.dtype, w1_scale is not None)
    chosen = own if tiles is None else parsed(tiles)
    pairs = sort_pairs(ids, experts, expert_map, chosen.block_m)
    packed, fused = w1_scale is not None, not swigluoai_and_mul.requested
    x = mxfp4.by_words(x) if packed else x
    glu = (alpha, limit) if fused else None
    inner = biased_gemm(x, w1, w1_scale, w1_bias, pairs, pairs.topk, None, chosen, glu)
    if not fused:
        inner = swigluoai_and_mul.run(inner, alpha, limit)
        inner = mxfp4.by_words(inner) if packed else inner
    out = biased_gemm(inner, w2, w2_scale, w2_bias, pairs, 1, weights, chosen)
    return sum_over_experts(out, ids, experts, expert_map)


def _plans(ids: T, w1: T, w2: T, expert_map: T | None, blocks: str | None = None) -> tuple[Any, Any]:
    """Return the plans of both products, from mxfp4_gemm.py or, for many rows per expert, from mxfp4_prompt.py."""
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    columns, topk, inner = 2 * w1.shape[2], ids.shape[1], 2 * w2.shape[2]
    if blocks == PROMPT or (blocks is None and ids.numel() > few.MOST_ROWS * experts):
        return many.Plan(columns, topk, glu=True), many.Plan(inner, 1, glu=False)
    is_sorted = sorts(ids.numel(), experts, expert_map)
    if is_sorted and (found := fp4_selection.plans(w1, w2, ids, expert_map, 1, few.MXFP4, blocks)):
        return found[0], found[1]
    return few.plan(columns, topk, is_sorted, glu=True), few.plan(inner, 1, is_sorted, glu=False)


def _supports_cuda(
    hidden_states: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T | None = None,
    w2_scale: T | None = None, expert_map: T | None = None, *_: Any, blocks: str | None = None, **__: Any,
) -> str | None:  # fmt: skip
    if topk_weights.dtype != torch.float32:
        return f"topk_weights is {topk_weights.dtype}, not float32"
    plans = _plans(topk_ids, w1, w2, expert_map, blocks)
    kernel = many if isinstance(plans[0], many.Plan) else few
    return (
        kernel.refused(hidden_states, w1, w1_scale, w1_bias, "w1")
        or kernel.refused(hidden_states, w2, w2_scale, w2_bias, "w2")
        or (few.too_large(*plans) if kernel is few else None)
        or kernel.unavailable(hidden_states.device)
        or few.not_loaded(hidden_states.device, *plans)
    )


def _cuda(
    hidden_states: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T,
    w2_scale: T, expert_map: T | None = None, alpha: float = ALPHA, limit: float = LIMIT, blocks: str | None = None,
) -> T:  # fmt: skip
    """blocks: see mxfp4_gemm.Blocks, or PROMPT; None: those of fp4_selection.py, or PROMPT for many rows."""
    _check(hidden_states, w1, w2, w1_bias, w2_bias, topk_weights, topk_ids, w1_scale, w2_scale)
    x, ids, weights = (
        hidden_states.contiguous(),
        topk_ids.to(torch.int32).contiguous(),
        topk_weights.contiguous(),
    )
    if ids.numel() == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    first, second = _plans(ids, w1, w2, expert_map, blocks)
    if isinstance(first, many.Plan):
        pairs = sort_pairs(ids, experts, expert_map, many.TOKENS)
        x = many.in_order(x)
        inner = many.mxfp4_prompt(x, w1, w1_scale, w1_bias, pairs, first, None, alpha, limit)
        out = many.mxfp4_prompt(inner, w2, w2_scale, w2_bias, pairs, second, weights)
    else:
        pairs = sort_pairs(ids, experts, expert_map, first.tokens)
        x = x.clone() if x.data_ptr() % 16 else x
        inner = few.mxfp4_gemm(x, w1, w1_scale, w1_bias, pairs, first, None, alpha, limit)
        out = few.mxfp4_gemm(inner, w2, w2_scale, w2_bias, pairs, second, weights)
    return sum_over_experts(out, ids, experts, expert_map)


def _torch(
    hidden_states: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T | None = None,
    w2_scale: T | None = None, expert_map: T | None = None, alpha: float = ALPHA, limit: float = LIMIT,
) -> T:  # fmt: skip
    _check(hidden_states, w1, w2, w1_bias, w2_bias, topk_weights, topk_ids, w1_scale, w2_scale)

    def mlp(e: int, x: T) -> T:
        both = F.linear(x, _floats(w1, w1_scale, e, x.dtype), w1_bias[e].to(x.dtype))
        inner = swigluoai_and_mul.run(both, alpha, limit)
        return F.linear(inner, _floats(w2, w2_scale, e, x.dtype), w2_bias[e].to(x.dtype))

    return on_own_rows(hidden_states, topk_weights, topk_ids, expert_map, w1.shape[0], mlp)


def _reference(hidden_states: T, w1: T, w2: T, w1_bias: T, w2_bias: T, weights: T, ids: T, *more: Any) -> T:
    scales = (*more[:2], None, None)[:2]
    _check(hidden_states, w1, w2, w1_bias, w2_bias, weights, ids, *scales)
    return reference(hidden_states, w1, w2, w1_bias, w2_bias, weights, ids, *more)


def _key(
    hidden_states: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T | None = None,
    w2_scale: T | None = None, expert_map: T | None = None, *_: Any, **__: Any,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:  # fmt: skip
    of = key_of if w1_scale is None else fp4_selection.key
    shape, sizes = of(w1, w2, topk_ids, expert_map)
    return (*shape, w1_scale is not None, hidden_states.dtype), sizes


def _dims(mxfp4: bool, dtype: torch.dtype, **sizes: int) -> dict[str, Any]:
    return {**dims_of_key(**sizes), **({"mxfp4": True} if mxfp4 else {})}


def _propose(shape: tuple[Any, ...], sizes: tuple[int, ...], chip: Chip) -> fp4_selection.Proposals:
    *where, packed, dtype = shape
    call = SizesOfCall(*where, *sizes)
    if not packed or dtype != torch.bfloat16:
        return ()
    few_rows = call.pairs <= few.MOST_ROWS * call.experts  # otherwise PROMPT is the default
    own = fp4_selection.default(call, 1, few.MXFP4) if few_rows else None
    found = fp4_selection.proposed("mxfp4-cuda", call, 1, few.MXFP4, chip, own)
    return (*found[:2], ("mxfp4-cuda", {"blocks": PROMPT})) if found and few_rows else found


def _fits(params: Mapping[str, Any], *args: Any) -> bool:
    (*shape, packed, _), sizes = _key(*args)
    call = SizesOfCall(*shape, *sizes)
    if params["blocks"] == PROMPT:
        return bool(packed) and call.pairs > call.experts
    return bool(packed) and fp4_selection.fits(params, call, 1, few.MXFP4)


fused_experts_swigluoai = define(
    "fused_experts_swigluoai(Tensor hidden_states, Tensor w1, Tensor w2, Tensor w1_bias, Tensor w2_bias,"
    " Tensor topk_weights, Tensor topk_ids, Tensor? w1_scale=None, Tensor? w2_scale=None, Tensor? expert_map=None,"
    " float alpha=1.702, float limit=7.0) -> Tensor",
    fake=lambda x, *args, **kwargs: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider(
            "mxfp4-cuda", _cuda, devices=("cuda",), supports=_supports_cuda,
            params=(*fp4_selection.SETS, {"blocks": PROMPT}), fits=_fits, checks=True,
        ),
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        shape=(*SHAPE, "mxfp4", "dtype"), sizes=SIZES, of=_key, dims=_dims, propose=_propose,
        points=fp4_selection.POINTS,
    ),
)  # fmt: skip


def _weight(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    if dtype != torch.uint8:
        return fan_in(call, shape, dtype)
    return torch.randint(0, 256, shape, dtype=dtype, generator=call.generator, device=call.device)


def _scale(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Return exponents for weights with a variance of about 1 / K. Random MXFP4 values have a variance of 8.4."""
    middle = 127 - round(math.log2(max(8.4 * mxfp4.BLOCK * shape[-1], 1)) / 2)
    found = torch.randint(-1, 2, shape, generator=call.generator, device=call.device)
    return (middle + found).to(dtype)


def _packed(axis: str) -> Axis:
    return Axis(lambda sizes: sizes[axis] // 2 if sizes["mxfp4"] else sizes[axis])


def _weights(sizes: Sizes) -> str:
    return "uint8" if sizes["mxfp4"] else str(sizes["dtype"])


def _case(
    name: str, tokens: int, experts: int, topk: int, hidden: int, intermediate: int, tag: str, dtype: str = "bfloat16",
    **more: Any,
) -> Case:  # fmt: skip
    sizes = {"experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate}
    return Case(name, {"tokens": tokens, **sizes, **more}, dtype, tags=(tag,))


def _models(name: str, experts: int) -> tuple[Case, ...]:
    sizes = (experts, 4, 2880, 2880, "model")
    return tuple(_case(f"{name}_{n}", n, *sizes, mxfp4=True) for n in (1, 32, 256, 4096))


def _bytes(rows: str, columns: str, scale: bool = False) -> str:
    """Bytes of the experts that a call reads."""
    count = f"experts_hit * {rows} * {columns}"
    return f"mxfp4 * {count} // 32" if scale else f"itemsize(weights) * {count}"


SPEC = OpSpec(
    name="fused_experts_swigluoai",
    level=2,
    reference=reference,
    op=fused_experts_swigluoai,
    cases=(
        *_models("gpt_oss_20b", 32),
        *_models("gpt_oss_120b", 128),
        _case("floats_63", 63, 5, 2, 72, 130, "odd"),
        _case("odd_63", 63, 5, 2, 64, 96, "odd", mxfp4=True),
        _case("one", 1, 1, 1, 1, 1, "odd", "float32"),
        _case("one_block", 1, 1, 1, 32, 32, "odd", "float32", mxfp4=True),
        _case("few", 2, 40, 3, 96, 32, "odd", "float32", mxfp4=True),
        _case("elsewhere", 19, 7, 3, 64, 160, "odd", "float32", elsewhere=True, mxfp4=True),
        _case("tight", 9, 3, 1, 40, 24, "odd", "float16", alpha=1.0, limit=0.5),
        _case("all", 70, 2, 2, 65, 33, "odd", "float32"),
        _case("none", 0, 4, 2, 64, 64, "odd", "float32", mxfp4=True),
    ),
    arguments=(
        Tensor("hidden_states", "tokens hidden"),
        Tensor(
            "w1", per_expert("2*intermediate hidden_columns"), "weights", values=_weight,
            bytes=_bytes("2 * intermediate", "hidden_columns"),
        ),
        Tensor(
            "w2", per_expert("hidden inner_columns"), "weights", values=_weight,
            bytes=_bytes("hidden", "inner_columns"),
        ),
        Tensor(
            "w1_bias", per_expert("2*intermediate"), std=0.2,
            bytes="itemsize(dtype) * experts_hit * 2 * intermediate",
        ),
        Tensor("w2_bias", per_expert("hidden"), std=0.2, bytes="itemsize(dtype) * experts_hit * hidden"),
        Tensor("topk_weights", "tokens topk", "float32"),
        Tensor("topk_ids", "tokens topk", "ids", bytes=ROUTING_BYTES),
        Tensor(
            "w1_scale", per_expert("2*intermediate cdiv(hidden,32)"), "uint8", "mxfp4", values=_scale,
            bytes=_bytes("2 * intermediate", "hidden", scale=True),
        ),
        Tensor(
            "w2_scale", per_expert("hidden cdiv(intermediate,32)"), "uint8", "mxfp4", values=_scale,
            bytes=_bytes("hidden", "intermediate", scale=True),
        ),
        Tensor("expert_map", "experts", "int32", when="elsewhere", bytes="0"),
        Scalar("alpha", default=ALPHA),
        Scalar("limit", default=LIMIT),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={
        **AXES,
        "hidden_columns": _packed("hidden"),
        "inner_columns": _packed("intermediate"),
        "weights": Axis.dtype(_weights),
    },
    constraints=(
        "topk <= experts", "not mxfp4 or hidden % 32 == 0", "not mxfp4 or intermediate % 32 == 0",
    ),
    values=routing,
    flops=FLOPS,
    extremes=extremes(5),
    activations=(0,),
    calls=("moe_align", "swigluoai_and_mul"),
)  # fmt: skip
