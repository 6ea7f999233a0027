"""Mixture of experts with NVFP4 weights, as fused_experts with w = f s q (arXiv 2509.25149); x is not quantized.

q is in e2m1, two in a byte as in checkpoints: even columns in the low half. s in e4m3 is for 16 columns, f for a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Call as SpecCall
from fastkernels.core.spec import Case, OpSpec, Tensor
from fastkernels.core.tuning import Chip, Key
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.linear.linear_int4 import packed_values
from fastkernels.overrides.linear.linear_nvfp4 import GROUP, decoded, dequantize_nvfp4
from fastkernels.overrides.moe import fp4_selection
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe.cases import (
    AXES,
    FLOPS,
    QWEN3_30B,
    ROUTING_BYTES,
    extremes,
    per_expert,
    routing,
)
from fastkernels.overrides.moe.fused_experts import (
    SHAPE,
    SIZES,
    dims_of_key,
    fused_experts,
    on_own_rows,
    weighted_sum,
)
from fastkernels.overrides.moe.selection import Call
from fastkernels.overrides.routing.sorted_pairs import sorts

T = torch.Tensor
# Rows an expert with which weights are dequantized for the call: the kernel reads them again, from L2, for each 8 rows
MOST_ROWS = 64


def reference(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, w1_factor: T, w2_factor: T, topk_weights: T, topk_ids: T,
    expert_map: T | None = None,
) -> T:  # fmt: skip
    """hidden_states: [T, H]; w1: uint8 [E, 2 I, H / 2], gate rows first; w2: uint8 [E, H, I / 2]; topk_weights,
    topk_ids: [T, K]. Returns [T, H] in hidden_states' dtype.

    w1_scale, w2_scale    float8 e4m3 [E, 2 I, H / 16] and [E, H, I / 16], not negative
    w1_factor, w2_factor  [E, 2 I] and [E, H]
    expert_map, topk_ids  as in `fused_experts`
    The first product and its activation are rounded as there. Raises ValueError for other shapes.
    """
    check(hidden_states, w1, w2, w1_scale, w2_scale, w1_factor, w2_factor, topk_weights, topk_ids)

    def mlp(e: int, x: T) -> T:
        first = dequantize_nvfp4(w1[e], w1_scale[e], w1_factor[e].to(x.dtype), x.dtype)
        gate, up = (x @ first.t()).to(hidden_states.dtype).chunk(2, dim=-1)
        second = dequantize_nvfp4(w2[e], w2_scale[e], w2_factor[e].to(x.dtype), x.dtype)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype) @ second.t()

    return weighted_sum(hidden_states, topk_weights, topk_ids, expert_map, w1.shape[0], mlp)


def check(
    x: T, w1: T, w2: T, w1_scale: T, w2_scale: T, w1_factor: T, w2_factor: T, weights: T, ids: T
) -> None:
    """Raise ValueError for tensors that do not match. Scales may be in wider floats, for the reference."""
    if x.dim() != 2 or w1.dim() != 3 or w2.dim() != 3 or w1.shape[1] % 2:
        raise ValueError(
            f"fused_experts_nvfp4: hidden_states {tuple(x.shape)} must be [T, H], w1 {tuple(w1.shape)} [E, 2 I, H / 2]"
            f" and w2 {tuple(w2.shape)} [E, H, I / 2]"
        )
    (experts, rows), hidden = w1.shape[:2], x.shape[1]
    for name, w, scale, factor, n, k in (
        ("w1", w1, w1_scale, w1_factor, rows, hidden), ("w2", w2, w2_scale, w2_factor, hidden, rows // 2)
    ):  # fmt: skip
        wanted: dict[str, tuple[T, tuple[int, ...]]] = {
            name: (w, (experts, n, k // 2)), f"{name}_scale": (scale, (experts, n, k // GROUP)),
            f"{name}_factor": (factor, (experts, n)),
        }  # fmt: skip
        for of, (tensor, shape) in wanted.items():
            kind = "uint8" if tensor is w else "floats"
            right = tensor.dtype == torch.uint8 if tensor is w else tensor.is_floating_point()
            if not right or tuple(tensor.shape) != shape or k % GROUP:
                raise ValueError(
                    f"fused_experts_nvfp4: {of} {tuple(tensor.shape)} ({tensor.dtype}) must be {kind} {shape}, with"
                    f" {k} columns a multiple of {GROUP}"
                )
    if ids.dim() != 2 or weights.shape != ids.shape or len(ids) != len(x):
        raise ValueError(
            f"fused_experts_nvfp4: topk_weights {tuple(weights.shape)} and topk_ids {tuple(ids.shape)} must both be"
            f" [{len(x)}, experts per token]"
        )


def _plans(ids: T, w1: T, w2: T, expert_map: T | None, blocks: str | None = None) -> list[few.Plan]:
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    is_sorted = sorts(ids.numel(), experts, expert_map)
    if is_sorted and (found := fp4_selection.plans(w1, w2, ids, expert_map, 2, few.NVFP4, blocks)):
        return found
    products = ((w1, ids.shape[1], 2), (w2, 1, 0))
    return few.fitting(
        lambda tokens: [
            few.plan(2 * w.shape[2], topk, is_sorted, glu, form=few.NVFP4, tokens=tokens)
            for w, topk, glu in products
        ]
    )


def _supports_cuda(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, w1_factor: T, w2_factor: T, topk_weights: T, topk_ids: T,
    expert_map: T | None = None, blocks: str | None = None,
) -> str | None:  # fmt: skip
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    if topk_ids.numel() > MOST_ROWS * experts:
        return f"more than {MOST_ROWS} rows an expert"
    floats = {t.dtype for t in (topk_weights, w1_factor, w2_factor)}
    if hidden_states.dtype != torch.bfloat16 or floats != {torch.float32}:
        return (
            f"hidden_states is {hidden_states.dtype}, weights and factors {floats}, not bfloat16 and float32"
        )
    for name, w, scale, factor in (("w1", w1, w1_scale, w1_factor), ("w2", w2, w2_scale, w2_factor)):
        if scale.dtype != FP8:
            return f"{name}_scale is {scale.dtype}, not {FP8}"
        if 2 * w.shape[2] % 32:
            return f"{2 * w.shape[2]} columns of {name} are not a multiple of 32"
        if (reason := few.wrong_matrix(w, name, scale=scale, factor=factor)) is not None:
            return reason
    plans = _plans(topk_ids, w1, w2, expert_map, blocks)
    return (
        few.too_large(*plans)
        or few.unavailable(hidden_states.device)
        or few.not_loaded(hidden_states.device, *plans)
    )


def _cuda(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, w1_factor: T, w2_factor: T, topk_weights: T, topk_ids: T,
    expert_map: T | None = None, blocks: str | None = None,
) -> T:  # fmt: skip
    """blocks: see mxfp4_gemm.Blocks; None: those of fp4_selection.py."""
    check(hidden_states, w1, w2, w1_scale, w2_scale, w1_factor, w2_factor, topk_weights, topk_ids)
    first, second = (w1, w1_scale, w1_factor), (w2, w2_scale, w2_factor)
    plans = _plans(topk_ids, w1, w2, expert_map, blocks)
    return few.mlp(hidden_states, first, second, topk_weights, topk_ids, expert_map, plans)


@triton.jit
def _dequantize_kernel(w_ptr, s_ptr, f_ptr, out_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < K // 2
    w = tl.load(w_ptr + row * (K // 2) + pairs, mask=mask, other=0).to(tl.int32)
    scale = tl.load(s_ptr + row * (K // 16) + pairs // 8, mask=mask, other=0).to(tl.int32)
    low, high = decoded(w, scale, scale, tl.load(f_ptr + row))
    both = tl.interleave(low.to(out_ptr.dtype.element_ty), high.to(out_ptr.dtype.element_ty))
    columns = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + row * K + columns, both, mask=columns < K)


def dequantized(w: T, scale: T, factor: T, dtype: torch.dtype) -> T:
    """Return experts' matrices [E, N, K] in a dtype."""
    (experts, n, half) = w.shape
    out = torch.empty((experts, n, 2 * half), dtype=dtype, device=w.device)
    if out.numel():
        block = min(next_power_of_2(half), 1024)
        _dequantize_kernel[experts * n, cdiv(half, block)](
            w, scale.view(torch.uint8), factor.float(), out, K=2 * half, BLOCK=block
        )
    return out


def _supports_dense(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, w1_factor: T, w2_factor: T, topk_weights: T, topk_ids: T,
    expert_map: T | None = None,
) -> str | None:  # fmt: skip
    if hidden_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {hidden_states.dtype} is not float32, float16 or bfloat16"
    if {w1_scale.dtype, w2_scale.dtype} != {FP8}:
        return f"w1_scale is {w1_scale.dtype} and w2_scale {w2_scale.dtype}, not {FP8}"
    wrong = [t.stride() for t in (w1, w2, w1_scale, w2_scale, w1_factor, w2_factor) if not t.is_contiguous()]
    return f"weights, scales and factors must be contiguous, got strides {wrong[0]}" if wrong else None


def _dense(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, w1_factor: T, w2_factor: T, topk_weights: T, topk_ids: T,
    expert_map: T | None = None,
) -> T:  # fmt: skip
    """Dequantize the weights for this call, which many tokens repay, and run `fused_experts`."""
    check(hidden_states, w1, w2, w1_scale, w2_scale, w1_factor, w2_factor, topk_weights, topk_ids)
    made = (
        dequantized(w, scale, factor, hidden_states.dtype)
        for w, scale, factor in ((w1, w1_scale, w1_factor), (w2, w2_scale, w2_factor))
    )
    return fused_experts.run(hidden_states, *made, topk_weights, topk_ids, expert_map, False)


def _torch(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, w1_factor: T, w2_factor: T, topk_weights: T, topk_ids: T,
    expert_map: T | None = None,
) -> T:  # fmt: skip
    check(hidden_states, w1, w2, w1_scale, w2_scale, w1_factor, w2_factor, topk_weights, topk_ids)
    acc = torch.promote_types(hidden_states.dtype, torch.float32)

    def mlp(e: int, x: T) -> T:
        both = x.to(acc) @ dequantize_nvfp4(w1[e], w1_scale[e], w1_factor[e], acc).t()
        second = dequantize_nvfp4(w2[e], w2_scale[e], w2_factor[e], acc)
        return silu_and_mul.run(both.to(x.dtype)).to(acc) @ second.t()

    return on_own_rows(hidden_states, topk_weights, topk_ids, expert_map, w1.shape[0], mlp)


def _key(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, w1_factor: T, w2_factor: T, topk_weights: T, topk_ids: T,
    expert_map: T | None = None,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:  # fmt: skip
    shape, sizes = fp4_selection.key(w1, w2, topk_ids, expert_map)
    return (*shape, hidden_states.dtype), sizes


def _propose(shape: tuple[Any, ...], sizes: tuple[int, ...], chip: Chip) -> fp4_selection.Proposals:
    *where, dtype = shape
    if dtype != torch.bfloat16:
        return ()
    call = Call(*where, *sizes)
    own = fp4_selection.default(call, 2, few.NVFP4)
    return fp4_selection.proposed("cuda", call, 2, few.NVFP4, chip, own)


def _fits(params: Mapping[str, Any], *args: Any) -> bool:
    (*shape, _), sizes = _key(*args)
    return fp4_selection.fits(params, Call(*shape, *sizes), 2, few.NVFP4)


fused_experts_nvfp4 = define(
    "fused_experts_nvfp4(Tensor hidden_states, Tensor w1, Tensor w2, Tensor w1_scale, Tensor w2_scale,"
    " Tensor w1_factor, Tensor w2_factor, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map=None) -> Tensor",
    fake=lambda x, *args, **kwargs: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider(
            "cuda", _cuda, devices=("cuda",), supports=_supports_cuda, params=fp4_selection.SETS, fits=_fits,
            checks=True,
        ),
        Provider("triton", _dense, devices=("cuda",), supports=_supports_dense),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        shape=(*SHAPE, "dtype"), sizes=SIZES, of=_key, dims=lambda dtype, **sizes: dims_of_key(**sizes),
        propose=_propose, points=fp4_selection.POINTS,
    ),
)  # fmt: skip


def _scale(call: SpecCall, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    return (call.rand(*shape) * 4 + 0.001).to(dtype)


def _factor(columns: str, call: SpecCall, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Factors with which weights have a variance of about 1 / K: outputs of about 1."""
    return ((call.rand(*shape) + 0.5) * 0.15 * max(call[columns], 1) ** -0.5).to(dtype)


def _matrix(name: str, rows: str, columns: str) -> tuple[Tensor, Tensor, Tensor]:
    """Declare a matrix of experts, its scales and its factors."""
    count = f"experts_hit * {rows} * {columns}"
    return (
        Tensor(name, per_expert(f"{rows} {columns}//2"), "uint8", values=packed_values, bytes=f"{count} // 2"),
        Tensor(
            f"{name}_scale", per_expert(f"{rows} {columns}//{GROUP}"), "float8_e4m3fn", values=_scale,
            bytes=f"{count} // {GROUP}",
        ),
        Tensor(
            f"{name}_factor", per_expert(rows), "float32", values=partial(_factor, columns),
            bytes=f"4 * experts_hit * {rows}",
        ),
    )  # fmt: skip


def _odd(
    name: str, tokens: int, experts: int, topk: int, hidden: int, intermediate: int, dtype: str = "float32",
    **more: Any,
) -> Case:  # fmt: skip
    sizes = {"experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate}
    return Case(name, {"tokens": tokens, **sizes, **more}, dtype, tags=("odd",))


FIRST, SECOND = _matrix("w1", "2*intermediate", "hidden"), _matrix("w2", "hidden", "intermediate")
SPEC = OpSpec(
    name="fused_experts_nvfp4",
    level=2,
    reference=reference,
    op=fused_experts_nvfp4,
    cases=(
        *(
            Case(f"decode_{n}", {"tokens": n, **QWEN3_30B}, "bfloat16", tags=("model",))
            for n in (1, 32, 256, 4096)
        ),
        _odd("odd_63", 63, 5, 2, 64, 80, "bfloat16"),
        _odd("elsewhere", 19, 7, 3, 64, 48, "float16", elsewhere=True),
        _odd("rows_19", 19, 9, 2, 160, 96, "bfloat16", elsewhere=True),
        _odd("few", 2, 40, 3, 96, 32),
        _odd("all", 70, 2, 2, 64, 32),
        _odd("one", 1, 1, 1, 16, 16),
        _odd("none", 0, 4, 2, 64, 64),
    ),
    arguments=(
        Tensor("hidden_states", "tokens hidden"),
        *(part for both in zip(FIRST, SECOND, strict=True) for part in both),
        Tensor("topk_weights", "tokens topk", "float32"),
        Tensor("topk_ids", "tokens topk", "ids", bytes=ROUTING_BYTES),
        Tensor("expert_map", "experts", "int32", when="elsewhere", bytes="0"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes=AXES,
    constraints=("topk <= experts", f"hidden % {GROUP} == 0", f"intermediate % {GROUP} == 0"),
    values=routing,
    flops=FLOPS,
    extremes=extremes(7),
    activations=(0,),
    calls=("fused_experts", "moe_align", "silu_and_mul"),
)
