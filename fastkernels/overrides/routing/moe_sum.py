"""Sum of the expert outputs of each token, weighted by the router (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, Expr, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS
from fastkernels.overrides.routing.cases import placement


def reference(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> torch.Tensor:
    """input: [T, K, H]. Returns the new value of output [T, H]: the sum over K in at least float32, in output's dtype.

    topk_weights  [T, K]: factor of each part, by default 1; routed_scaling_factor multiplies the sum
    topk_ids      [T, K]: parts with a negative id are skipped, whatever they contain
    expert_map    [experts]: parts of experts on other ranks (-1 in the map) are skipped; needs topk_ids
    """
    parts = input.to(torch.promote_types(input.dtype, torch.float32))
    if topk_weights is not None:
        parts = parts * topk_weights.to(parts.dtype).unsqueeze(-1)
    if topk_ids is not None:
        here = topk_ids >= 0
        if expert_map is not None:
            here = here & (expert_map[topk_ids.clamp(min=0).long()] >= 0)
        parts = parts.masked_fill(~here.unsqueeze(-1), 0.0)
    return (parts.sum(dim=1) * routed_scaling_factor).to(output.dtype)


@triton.jit
def _moe_sum_kernel(
    in_ptr, out_ptr, weights_ptr, ids_ptr, map_ptr, in_stride0, in_stride1, out_stride, factor, H, n_blocks,
    K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (token, block of columns). The unrolled loop over experts keeps all loads in flight.
    token = (tl.program_id(0) // n_blocks).to(tl.int64)
    cols = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < H
    at = in_ptr + token * in_stride0 + cols
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        if HAS_IDS:
            expert = tl.load(ids_ptr + token * K + k)
            here = expert >= 0
            if HAS_MAP:
                here = here & (tl.load(map_ptr + tl.where(here, expert, 0)) >= 0)
            part = tl.load(at + k * in_stride1, mask=mask & here, other=0.0).to(tl.float32)
        else:
            part = tl.load(at + k * in_stride1, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            weight = tl.load(weights_ptr + token * K + k).to(tl.float32)
            if HAS_IDS:
                weight = tl.where(here, weight, 0.0)
            part *= weight
        total += part
    out = (total * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + cols, out, mask=mask)


def _check(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> None:
    if input.dim() != 3 or output.shape != (input.shape[0], input.shape[2]):
        raise ValueError(
            f"moe_sum: input must be [T, K, H] and output [T, H], got {tuple(input.shape)} and {tuple(output.shape)}"
        )
    for name, t in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if t is not None and t.shape != input.shape[:2]:
            raise ValueError(
                f"moe_sum: {name} {tuple(t.shape)} must be {tuple(input.shape[:2])}, as in input"
            )
    if expert_map is not None and topk_ids is None:
        raise ValueError("moe_sum: expert_map needs topk_ids")


def _supports_triton(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> str | None:
    for name, t in (("input", input), ("output", output)):
        if t.dtype not in FLOATS:
            return f"{name} has dtype {t.dtype}, not float16, bfloat16 or float32"
        if t.stride(-1) != 1 and t.shape[-1] != 1:
            return f"{name} has strides {t.stride()}: columns must be contiguous"
    small = {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map}
    for name, part in small.items():
        if part is not None and not part.is_contiguous():
            return f"{name} has strides {part.stride()}: it must be contiguous"
    if input.dim() == 3 and input.shape[1] > 32:
        return f"{input.shape[1]} experts per token exceed the limit of 32"
    return None


def _triton(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> None:
    _check(input, output, topk_weights, topk_ids, expert_map)
    if output.numel() == 0:
        return
    tokens, k, hidden = input.shape
    # Eight bytes per thread and expert with 128 threads or more; small batches use smaller blocks to fill the GPU.
    block = 2048 if tokens * hidden >= 2048 * 512 else 512
    block = min(block, next_power_of_2(hidden))
    n_blocks = cdiv(hidden, block)
    grid = (tokens * n_blocks,)
    launch_kernel(
        _moe_sum_kernel, grid,
        input, output, topk_weights, topk_ids, expert_map, input.stride(0), input.stride(1), output.stride(0),
        routed_scaling_factor, hidden, n_blocks, K=k, HAS_WEIGHTS=topk_weights is not None,
        HAS_IDS=topk_ids is not None, HAS_MAP=expert_map is not None, BLOCK=block, num_warps=max(block // 256, 1),
    )  # fmt: skip


def _reference(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> None:
    _check(input, output, topk_weights, topk_ids, expert_map)
    output.copy_(reference(input, output, topk_weights, topk_ids, expert_map, routed_scaling_factor))


moe_sum = define(
    "moe_sum(Tensor input, Tensor(a!) output, Tensor? topk_weights=None, Tensor? topk_ids=None,"
    " Tensor? expert_map=None, float routed_scaling_factor=1.0) -> ()",
    fake=lambda *args: None,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _weights(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    weights = call.rand(*shape)
    return weights / weights.sum(dim=-1, keepdim=True)


def _values(call: Call) -> Mapping[str, torch.Tensor]:
    """Every fifth pair has no expert and half of the experts are on another rank; their parts hold garbage."""
    if not call["absent"]:
        return {}
    parts, experts, size = call.tensor("input"), call["experts"], (call["tokens"], call["topk"])
    ids = torch.randint(0, experts, size, generator=call.generator, device=call.device, dtype=torch.int32)
    ids.view(-1)[::5] = -1
    placed = placement(call, experts, (experts + 1) // 2)
    parts[(ids < 0) | (placed[ids.clamp(min=0).long()] < 0)] = 3e4
    return {"input": parts, "topk_ids": ids, "expert_map": placed}


def _pairs(args: SimpleNamespace) -> int | None:
    """Count the pairs whose expert is here."""
    if args.topk_ids is None:
        return None
    here = args.topk_ids >= 0
    if args.expert_map is not None:
        here = here & (args.expert_map[args.topk_ids.clamp(min=0).long()] >= 0)
    return int(here.sum())


def _one_expert(args: list[Any]) -> None:
    """All parts of a token but the first cancel out."""
    args[0][:, 1:] = 0
    args[0][:, 1::2] = 3.0
    args[0][:, 2::2] = -3.0


def _none_here(args: list[Any]) -> None:
    """Every expert is on another rank."""
    if args[3] is not None:
        args[3].fill_(-1)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1.0, **dims: Any) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="moe_sum",
    level=1,
    by_default=True,
    reference=reference,
    op=moe_sum,
    cases=(
        _case("decode_1", "model", weight=32, tokens=1, topk=2, hidden=4096),
        _case("decode_32", "model", weight=32, tokens=32, topk=2, hidden=4096),
        _case("prefill_4k", "model", tokens=4096, topk=2, hidden=4096),
        _case("deepseek_32", "model", weight=58, tokens=32, topk=8, hidden=7168, factor=2.5),
        _case("deepseek_4k", "model", tokens=4096, topk=8, hidden=7168, factor=2.5),
        _case("weighted_4k", "model", tokens=4096, topk=8, hidden=2048, weighted=True),
        _case("odd_63", "odd", tokens=63, topk=4, hidden=1000),
        _case("one", "odd", "float32", tokens=1, topk=1, hidden=1),
        _case("factor", "odd", "float16", tokens=5, topk=6, hidden=1128, factor=2.5),
        _case("weighted", "odd", tokens=7, topk=3, hidden=577, weighted=True),
        _case("absent", "odd", "float32", tokens=33, topk=5, hidden=130, absent=True),
        _case("absent_weighted", "odd", tokens=9, topk=8, hidden=63, absent=True, weighted=True, factor=0.5),
        _case("strided", "odd", "float16", tokens=5, topk=2, hidden=96, pad=9),
        _case("no_token", "odd", tokens=0, topk=2, hidden=64),
    ),
    arguments=(
        Tensor("input", "tokens topk hidden", pad="pad", bytes="itemsize(dtype) * pairs * hidden"),
        Tensor("output", "tokens hidden", mutated=True, pad="pad", bytes="itemsize(dtype) * tokens * hidden"),
        Tensor("topk_weights", "tokens topk", "float32", when="weighted", values=_weights),
        Tensor("topk_ids", "tokens topk", "int32", when="absent"),
        Tensor("expert_map", "experts", "int32", when="absent", bytes="0"),
        Scalar("routed_scaling_factor", "factor", default=1.0),
    ),
    axes={
        "tokens": Axis.per_call(),
        "topk": Axis.count(),
        "hidden": Axis.width(),
        "experts": Axis(64, stated=True),
        "pairs": Axis.counted(_pairs, Expr("tokens * topk")),
    },
    values=_values,
    flops="2 * pairs * hidden",
    extremes={"one_expert": _one_expert, "none_here": _none_here},
)
