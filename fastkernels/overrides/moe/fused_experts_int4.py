"""Mixture of experts with 4-bit weights, as fused_experts with w = s (q - z) (GPTQ, arXiv 2210.17323; AWQ, 2306.00978).

Weights are packed as those of linear_int4; activations are not quantized.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Tensor
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.linear.linear_int4 import (
    UNIT,
    centered,
    dequantize_int4,
    packed_values,
    zero_points,
)
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe.cases import (
    AXES,
    FLOPS,
    MIXTRAL,
    QWEN3_30B,
    ROUTING_BYTES,
    extremes,
    per_expert,
    routing,
)
from fastkernels.overrides.moe.fused_experts import on_own_rows, weighted_sum
from fastkernels.overrides.moe.grouped_gemm import sum_over_experts
from fastkernels.overrides.moe.moe_tiles import Tiles
from fastkernels.overrides.routing.sorted_pairs import Sorted, sort_pairs, sorts

T = torch.Tensor


def reference(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, w1_zero: T | None = None,
    w2_zero: T | None = None, expert_map: T | None = None,
) -> T:  # fmt: skip
    """hidden_states: [T, H]; w1: uint8 [E, 2 I, H / 2], gate rows first; w2: uint8 [E, H, I / 2]; topk_weights,
    topk_ids: [T, K]. Returns [T, H] in hidden_states' dtype.

    w1_scale, w2_scale  [E, 2 I, G] and [E, H, G'], one for as many columns of a row, which are a multiple of 32
    w1_zero, w2_zero    uint8 of the same shapes, the integers that stand for 0; None: 8 everywhere
    expert_map, topk_ids  as in `fused_experts`
    The first product and its activation are rounded as there. Raises ValueError for other shapes.
    """
    check(hidden_states, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, w1_zero, w2_zero)

    def mlp(e: int, x: T) -> T:
        both = x @ _floats(w1, w1_scale, w1_zero, e, x.dtype).t()
        gate, up = both.to(hidden_states.dtype).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype) @ _floats(w2, w2_scale, w2_zero, e, x.dtype).t()

    return weighted_sum(hidden_states, topk_weights, topk_ids, expert_map, w1.shape[0], mlp)


def _floats(w: T, scale: T, zero: T | None, expert: int, dtype: torch.dtype) -> T:
    """The matrix of one expert."""
    return dequantize_int4(w[expert], scale[expert], None if zero is None else zero[expert], dtype)


def check(
    x: T, w1: T, w2: T, w1_scale: T, w2_scale: T, weights: T, ids: T, w1_zero: T | None, w2_zero: T | None
) -> None:
    """Raise ValueError for tensors that do not match."""
    if x.dim() != 2 or w1.dim() != 3 or w2.dim() != 3 or w1.shape[1] % 2:
        raise ValueError(
            f"fused_experts_int4: hidden_states {tuple(x.shape)} must be [T, H], w1 {tuple(w1.shape)} [E, 2 I, H / 2]"
            f" and w2 {tuple(w2.shape)} [E, H, I / 2]"
        )
    (experts, rows), hidden = w1.shape[:2], x.shape[1]
    wanted = {"w1": (w1, w1_scale, w1_zero, rows, hidden), "w2": (w2, w2_scale, w2_zero, hidden, rows // 2)}
    for name, (w, scale, zero, n, k) in wanted.items():
        if w.dtype != torch.uint8 or tuple(w.shape) != (experts, n, k // 2) or k % UNIT:
            raise ValueError(
                f"fused_experts_int4: {name} {tuple(w.shape)} ({w.dtype}) must be uint8 {(experts, n, k // 2)}, with"
                f" {k} columns a multiple of {UNIT}"
            )
        groups = scale.shape[-1]
        if tuple(scale.shape) != (experts, n, groups) or (
            k and (not groups or k % groups or k // groups % UNIT)
        ):
            raise ValueError(
                f"fused_experts_int4: {name}_scale {tuple(scale.shape)} must be [{experts}, {n}, G], one for each"
                f" group of {k} / G columns, a multiple of {UNIT}"
            )
        if zero is not None and (zero.shape != scale.shape or zero.dtype != torch.uint8):
            raise ValueError(
                f"fused_experts_int4: {name}_zero {tuple(zero.shape)} ({zero.dtype}) must be uint8"
                f" {tuple(scale.shape)}, as {name}_scale"
            )
    if ids.dim() != 2 or weights.shape != ids.shape or len(ids) != len(x):
        raise ValueError(
            f"fused_experts_int4: topk_weights {tuple(weights.shape)} and topk_ids {tuple(ids.shape)} must both be"
            f" [{len(x)}, experts per token]"
        )


# The number of pairs changes between calls: one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["E", "n_pairs", "n_blocks"])
def _int4_gemm_kernel(
    a_ptr, b_ptr, s_ptr, z_ptr, c_ptr, scale_ptr, pairs_ptr, experts_ptr, total_ptr, N, E, n_pairs, n_blocks, a_stride,
    K: tl.constexpr, GROUP: tl.constexpr, TOPK: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_SCALE: tl.constexpr,
    SORTED: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    # GROUP_M blocks of rows run next to each other, column by column, and share an expert's matrix through L2.
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP_M * columns) * GROUP_M
    height = min(n_blocks - first, GROUP_M)
    block = first + pid % (GROUP_M * columns) % height
    col = pid % (GROUP_M * columns) // height
    if block * BLOCK_M >= (tl.load(total_ptr) if SORTED else n_blocks * BLOCK_M):
        return
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    if SORTED:
        pairs = tl.load(pairs_ptr + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    else:
        pairs = tl.where(tl.arange(0, BLOCK_M) == 0, block, n_pairs)
    there = pairs < n_pairs
    rows = (tl.where(there, pairs, 0) // TOPK).to(tl.int64)
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    # As in linear_int4: the weight is the left matrix, BLOCK_K divides GROUP, a byte has columns that are 16 apart.
    at = expert * N + tl.minimum(cols, N - 1)  # a row past the end is the last row again
    bytes = tl.arange(0, BLOCK_K // 2)
    b_at = b_ptr + at[:, None] * (K // 2) + bytes[None, :]
    a_at = a_ptr + rows[None, :] * a_stride + (bytes // 16 * 32 + bytes % 16)[:, None]
    scales: tl.constexpr = K // GROUP
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        b = tl.load(b_at + k // 2)
        low = tl.load(a_at + k, mask=there[None, :], other=0.0)
        high = tl.load(a_at + k + 16, mask=there[None, :], other=0.0)
        scale = tl.load(s_ptr + at * scales + k // GROUP).to(tl.float32)
        if HAS_ZERO:
            zero = tl.load(z_ptr + at * scales + k // GROUP)[:, None]
        else:
            zero = tl.full((BLOCK_N, 1), 8, dtype=tl.uint8)
        if UPCAST:
            low, high = low.to(tl.float32), high.to(tl.float32)
        part = tl.dot(centered(b & 15, zero, a_ptr, UPCAST), low, input_precision="ieee")
        part = tl.dot(centered(b >> 4, zero, a_ptr, UPCAST), high, part, input_precision="ieee")
        acc += part * scale[:, None]
    out = tl.trans(acc)
    if HAS_SCALE:
        out *= tl.load(scale_ptr + pairs, mask=there, other=0.0).to(tl.float32)[:, None]
    to = c_ptr + pairs.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(to, out.to(c_ptr.dtype.element_ty), mask=there[:, None] & (cols < N)[None, :])


def int4_gemm(
    a: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, b_zero: torch.Tensor | None, pairs: Sorted, topk: int,
    scale: torch.Tensor | None, t: Tiles,
) -> torch.Tensor:  # fmt: skip
    """a: [pairs / topk, K]; b: uint8 [E, N, K / 2] and its scales and zero points [E, N, G] as in linear_int4, both
    contiguous; scale: one factor per pair, or None.

    Returns [pairs, N] in a's dtype: row i is scale[i] * b[e] @ a[i / topk], e the expert of pair i. Rows without a
    local expert are not written.
    """
    n, k = b.shape[1], a.shape[1]
    out = torch.empty((pairs.n_pairs, n), dtype=a.dtype, device=a.device)
    group = k // b_scale.shape[2]
    grid = (pairs.blocks * cdiv(n, t.block_n),)
    _int4_gemm_kernel[grid](
        a, b, b_scale, b_zero, out, scale, pairs.pairs, pairs.experts, pairs.total, n, b.shape[0], pairs.n_pairs,
        pairs.blocks, a.stride(0), K=k, GROUP=group, TOPK=topk, HAS_ZERO=b_zero is not None,
        HAS_SCALE=scale is not None, SORTED=pairs.pairs is not None,
        UPCAST=a.device.type == "cpu" or a.dtype == torch.float32, BLOCK_M=t.block_m, BLOCK_N=t.block_n,
        BLOCK_K=next(size for size in (128, 64, 32) if size <= t.block_k and group % size == 0), GROUP_M=t.group_m,
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    return out


def int4_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for an average number of rows per expert; decoded weights take registers, so tiles are small."""
    block_m = 16 if rows <= 16 else 64
    if dtype == torch.float32:
        return Tiles(block_m, 64, 32, 8, 4, 2)
    return Tiles(16, 64, 128, 1, 4, 4) if block_m == 16 else Tiles(64, 128, 64, 8, 8, 3)


def _supports_triton(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, w1_zero: T | None = None,
    w2_zero: T | None = None, expert_map: T | None = None,
) -> str | None:  # fmt: skip
    if hidden_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {hidden_states.dtype} is not float32, float16 or bfloat16"
    named = {
        "w1": w1,
        "w2": w2,
        "w1_scale": w1_scale,
        "w2_scale": w2_scale,
        "w1_zero": w1_zero,
        "w2_zero": w2_zero,
    }
    for name, t in named.items():
        if t is not None and not t.is_contiguous():
            return f"{name} has strides {tuple(t.stride())}: it must be contiguous"
    return None


def _triton(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, w1_zero: T | None = None,
    w2_zero: T | None = None, expert_map: T | None = None,
) -> T:  # fmt: skip
    check(hidden_states, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, w1_zero, w2_zero)
    x, ids, weights = hidden_states.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    if ids.numel() == 0 or w1.numel() == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    tiles = int4_tiles(ids.numel() // experts, x.dtype)
    pairs = sort_pairs(ids, experts, expert_map, tiles.block_m)
    both = int4_gemm(x, w1, w1_scale, w1_zero, pairs, pairs.topk, None, tiles)
    out = int4_gemm(silu_and_mul.run(both), w2, w2_scale, w2_zero, pairs, 1, weights, tiles)
    return sum_over_experts(out, ids, experts, expert_map)


def _plans(
    ids: T, w1: T, w2: T, w1_scale: T, w2_scale: T, zeros: bool, expert_map: T | None
) -> list[few.Plan]:
    """Return the plans of both products in CUDA C++."""
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    is_sorted = sorts(ids.numel(), experts, expert_map)

    def make(tokens: int) -> list[few.Plan]:
        found = []
        for w, scale, topk, glu in ((w1, w1_scale, ids.shape[1], 2), (w2, w2_scale, 1, 0)):
            k, half = 2 * w.shape[2], scale.dtype == torch.float16
            more = {"group": k // scale.shape[2], "zero": zeros, "half_scales": half, "tokens": tokens}
            found.append(few.plan(k, topk, is_sorted, glu, form=few.INT4, **more))
        return found

    return few.fitting(make)


def _supports_cuda(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, w1_zero: T | None = None,
    w2_zero: T | None = None, expert_map: T | None = None,
) -> str | None:  # fmt: skip
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    if topk_ids.numel() > few.MOST_ROWS * experts:
        return f"more than {few.MOST_ROWS} rows an expert"
    if hidden_states.dtype != torch.bfloat16 or topk_weights.dtype != torch.float32:
        return f"hidden_states is {hidden_states.dtype} and topk_weights {topk_weights.dtype}, not bfloat16 and float32"
    if (w1_zero is None) != (w2_zero is None):
        return "one of w1 and w2 has zero points"
    for name, w, scale, zero in (("w1", w1, w1_scale, w1_zero), ("w2", w2, w2_scale, w2_zero)):
        group = 2 * w.shape[2] // max(scale.shape[2], 1)
        if not group or group % 128:
            return f"groups of {group} columns of {name} are not multiples of 128"
        if scale.dtype not in (torch.bfloat16, torch.float16):
            return f"{name}_scale is {scale.dtype}, not bfloat16 or float16"
        if (reason := few.wrong_matrix(w, name, scale=scale, zero=zero)) is not None:
            return reason
    plans = _plans(topk_ids, w1, w2, w1_scale, w2_scale, w1_zero is not None, expert_map)
    # Mixtral's blocks of 4 tokens took 1.6 times as long as Triton's kernel at 8 rows an expert, on an H100.
    if topk_ids.numel() > 2 * experts and 1 < plans[0].tokens < few.TOKENS:
        return f"more than 2 rows an expert, in blocks of {plans[0].tokens} tokens"
    return (
        few.too_large(*plans)
        or few.unavailable(hidden_states.device)
        or few.not_loaded(hidden_states.device, *plans)
    )


def _cuda(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, w1_zero: T | None = None,
    w2_zero: T | None = None, expert_map: T | None = None,
) -> T:  # fmt: skip
    check(hidden_states, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, w1_zero, w2_zero)
    plans = _plans(topk_ids, w1, w2, w1_scale, w2_scale, w1_zero is not None, expert_map)
    first, second = (w1, w1_scale, w1_zero), (w2, w2_scale, w2_zero)
    return few.mlp(hidden_states, first, second, topk_weights, topk_ids, expert_map, plans)


def _torch(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, w1_zero: T | None = None,
    w2_zero: T | None = None, expert_map: T | None = None,
) -> T:  # fmt: skip
    check(hidden_states, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, w1_zero, w2_zero)
    acc = torch.promote_types(hidden_states.dtype, torch.float32)

    def mlp(e: int, x: T) -> T:
        # In float32: the error of rounded weights is as large as a small result.
        both = F.linear(x.to(acc), _floats(w1, w1_scale, w1_zero, e, acc)).to(x.dtype)
        return F.linear(silu_and_mul.run(both).to(acc), _floats(w2, w2_scale, w2_zero, e, acc))

    return on_own_rows(hidden_states, topk_weights, topk_ids, expert_map, w1.shape[0], mlp)


fused_experts_int4 = define(
    "fused_experts_int4(Tensor hidden_states, Tensor w1, Tensor w2, Tensor w1_scale, Tensor w2_scale,"
    " Tensor topk_weights, Tensor topk_ids, Tensor? w1_zero=None, Tensor? w2_zero=None, Tensor? expert_map=None)"
    " -> Tensor",
    fake=lambda x, *args, **kwargs: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("cuda", _cuda, devices=("cuda",), supports=_supports_cuda),
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _scale(axes: str, groups: str) -> Tensor:
    """Declare the scales of w1 or w2, with which weights have a variance of about 1 / K: outputs of about 1."""
    name, columns = ("w1_scale", "hidden") if groups == "groups" else ("w2_scale", "intermediate")

    def values(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
        return ((call.rand(*shape) + 0.5) * 0.2 * max(call[columns], 1) ** -0.5).to(dtype)

    counted = f"itemsize(dtype) * experts_hit * {axes} * {groups}"
    return Tensor(name, per_expert(f"{axes} {groups}"), values=values, bytes=counted)


def _groups(axis: str) -> Axis:
    return Axis(lambda sizes: sizes[axis] // (sizes["group"] or max(sizes[axis], 1)))


def _case(
    name: str, tokens: int, sizes: dict[str, int], group: int, tag: str, dtype: str, **more: Any
) -> Case:
    return Case(name, {"tokens": tokens, **sizes, "group": group, **more}, dtype, tags=(tag,))


def _odd(
    name: str, tokens: int, experts: int, topk: int, hidden: int, intermediate: int, group: int, dtype: str = "float32",
    **more: Any,
) -> Case:  # fmt: skip
    sizes = {"experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate}
    return _case(name, tokens, sizes, group, "odd", dtype, **more)


def _models(name: str, sizes: dict[str, int], **more: Any) -> tuple[Case, ...]:
    return tuple(_case(f"{name}_{n}", n, sizes, 128, "model", "bfloat16", **more) for n in (1, 32, 256, 4096))


SPEC = OpSpec(
    name="fused_experts_int4",
    level=2,
    reference=reference,
    op=fused_experts_int4,
    cases=(
        *_models("qwen3", QWEN3_30B),
        *_models("mixtral_awq", MIXTRAL, zeros=True),
        _odd("odd_63", 63, 5, 2, 64, 96, 32, "bfloat16"),
        _odd("zeros_33", 33, 12, 3, 128, 64, 64, "float16", zeros=True),
        _odd("channel", 9, 3, 1, 96, 160, 0, zeros=True),
        _odd("rows_19", 19, 9, 2, 256, 128, 128, "bfloat16", elsewhere=True, zeros=True),
        _odd("few", 2, 40, 3, 96, 32, 32),
        _odd("elsewhere", 19, 7, 3, 64, 160, 32, elsewhere=True),
        _odd("one", 1, 1, 1, 32, 32, 32),
        _odd("all", 70, 2, 2, 64, 32, 0),
        _odd("none", 0, 4, 2, 64, 64, 32),
    ),
    arguments=(
        Tensor("hidden_states", "tokens hidden"),
        Tensor(
            "w1", per_expert("2*intermediate hidden//2"), "uint8", values=packed_values,
            bytes="experts_hit * intermediate * hidden",
        ),
        Tensor(
            "w2", per_expert("hidden intermediate//2"), "uint8", values=packed_values,
            bytes="experts_hit * hidden * intermediate // 2",
        ),
        _scale("2*intermediate", "groups"),
        _scale("hidden", "inner_groups"),
        Tensor("topk_weights", "tokens topk", "float32"),
        Tensor("topk_ids", "tokens topk", "ids", bytes=ROUTING_BYTES),
        Tensor(
            "w1_zero", per_expert("2*intermediate groups", "zeros"), "uint8", "zeros", values=zero_points,
            bytes="experts_hit * 2 * intermediate * groups",
        ),
        Tensor(
            "w2_zero", per_expert("hidden inner_groups", "zeros"), "uint8", "zeros", values=zero_points,
            bytes="experts_hit * hidden * inner_groups",
        ),
        Tensor("expert_map", "experts", "int32", when="elsewhere", bytes="0"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={
        **AXES,
        # columns that share a scale, 0: all
        "group": Axis.option(read=lambda a: _group_of(a.w1, a.w1_scale, a.w2_scale)),
        "groups": _groups("hidden"),
        "inner_groups": _groups("intermediate"),
    },
    constraints=(
        "topk <= experts", "hidden % 32 == 0", "intermediate % 32 == 0", "hidden % max(group, 1) == 0",
        "intermediate % max(group, 1) == 0",
    ),
    values=routing,
    flops=FLOPS,
    extremes=extremes(5),
    activations=(0,),
    calls=("moe_align", "silu_and_mul"),
)  # fmt: skip


def _group_of(w1: T, w1_scale: T, w2_scale: T) -> int:
    """The columns that share a scale; 0: one scale for each row."""
    if w1_scale.shape[2] <= 1 and w2_scale.shape[2] <= 1:
        return 0
    return 2 * w1.shape[2] // w1_scale.shape[2]
