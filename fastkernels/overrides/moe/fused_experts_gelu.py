"""Gemma 4's experts: a weighted sum of gated MLPs with GELU, y = sum w (gelu(x Wg^T) * (x Wu^T)) Wd^T, gelu by tanh."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec, Tensor, fan_in
from fastkernels.overrides.activation.gelu_and_mul import gelu_and_mul
from fastkernels.overrides.moe.cases import AXES, FLOPS, ROUTING_BYTES, extremes, per_expert, routing
from fastkernels.overrides.moe.fused_experts import check_sizes, on_own_rows, weighted_sum
from fastkernels.overrides.moe.grouped_gemm import grouped_gemm, sum_over_experts
from fastkernels.overrides.moe.moe_tiles import tiles, wide
from fastkernels.overrides.routing.sorted_pairs import sort_pairs

T = torch.Tensor


def reference(hidden_states: T, w1: T, w2: T, topk_weights: T, topk_ids: T, expert_map: T | None = None) -> T:
    """hidden_states: [T, H]; w1: [E, 2 I, H], gate rows first; w2: [E, H, I]; topk_weights, topk_ids: [T, K].

    Returns [T, H] in hidden_states' dtype. expert_map and roundings: see fused_experts.
    """

    def mlp(e: int, x: T) -> T:
        gate, up = (x @ w1[e].to(x.dtype).t()).to(hidden_states.dtype).chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") * up).to(x.dtype) @ w2[e].to(x.dtype).t()

    return weighted_sum(hidden_states, topk_weights, topk_ids, expert_map, w1.shape[0], mlp)


def _supports_triton(hidden_states: T, w1: T, w2: T, *_: Any, **__: Any) -> str | None:
    if hidden_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {hidden_states.dtype} is not float32, float16 or bfloat16"
    if hidden_states.dtype == torch.bfloat16 and hidden_states.device.type == "cpu":
        return "Triton's interpreter computes tl.dot of bfloat16 on its bits as integers"
    for name, w in (("w1", w1), ("w2", w2)):
        if w.dtype != hidden_states.dtype:
            return f"{name} is {w.dtype}, hidden_states {hidden_states.dtype}"
        if w.stride(-1) != 1:
            return f"{name} has strides {tuple(w.stride())}: the last dimension must be contiguous"
    return None


def _triton(hidden_states: T, w1: T, w2: T, topk_weights: T, topk_ids: T, expert_map: T | None = None) -> T:
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
    x, ids, weights = hidden_states.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    if ids.numel() == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    sizes = tiles(ids.numel() // experts, x.dtype, wide(x.device))
    pairs = sort_pairs(ids, experts, expert_map, sizes.block_m)
    inner = gelu_and_mul.run(grouped_gemm(x, w1, pairs, pairs.topk, None, sizes), "tanh")
    out = grouped_gemm(inner, w2, pairs, 1, weights, sizes)
    return sum_over_experts(out, ids, experts, expert_map)


def _torch(hidden_states: T, w1: T, w2: T, topk_weights: T, topk_ids: T, expert_map: T | None = None) -> T:
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)

    def mlp(e: int, x: T) -> T:
        return F.linear(gelu_and_mul.run(F.linear(x, w1[e]), "tanh"), w2[e])

    return on_own_rows(hidden_states, topk_weights, topk_ids, expert_map, w1.shape[0], mlp)


def _reference(hidden_states: T, w1: T, w2: T, topk_weights: T, topk_ids: T, *more: Any) -> T:
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
    return reference(hidden_states, w1, w2, topk_weights, topk_ids, *more)


fused_experts_gelu = define(
    "fused_experts_gelu(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
    " Tensor? expert_map=None) -> Tensor",
    fake=lambda x, *args, **kwargs: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, tokens: int, experts: int, topk: int, hidden: int, intermediate: int, tag: str, dtype: str = "bfloat16",
    **more: bool,
) -> Case:  # fmt: skip
    sizes = {"experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate}
    return Case(name, {"tokens": tokens, **sizes, **more}, dtype, tags=(tag,))


SPEC = OpSpec(
    name="fused_experts_gelu",
    level=2,
    reference=reference,
    op=fused_experts_gelu,
    cases=(
        *(_case(f"gemma4_{n}", n, 128, 8, 2816, 704, "model") for n in (1, 32, 256, 4096)),
        _case("odd_63", 63, 5, 2, 72, 130, "odd"),
        _case("one", 1, 1, 1, 1, 1, "odd", "float32"),
        _case("odd_5", 5, 12, 3, 100, 63, "odd", "float32"),
        _case("odd_17", 17, 6, 4, 96, 40, "odd", "float16"),
        _case("elsewhere", 19, 7, 3, 64, 48, "odd", "float32", elsewhere=True),
        _case("all", 70, 2, 2, 65, 33, "odd", "float32"),
        _case("none", 0, 4, 2, 64, 48, "odd", "float32"),
    ),
    arguments=(
        Tensor("hidden_states", "tokens hidden"),
        Tensor(
            "w1", per_expert("2*intermediate hidden"), values=fan_in,
            bytes="itemsize(dtype) * experts_hit * 2 * intermediate * hidden",
        ),
        Tensor(
            "w2", per_expert("hidden intermediate"), values=fan_in,
            bytes="itemsize(dtype) * experts_hit * hidden * intermediate",
        ),
        Tensor("topk_weights", "tokens topk", "float32"),
        Tensor("topk_ids", "tokens topk", "ids", bytes=ROUTING_BYTES),
        Tensor("expert_map", "experts", "int32", when="elsewhere", bytes="0"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes=AXES,
    constraints=("topk <= experts",),
    values=routing,
    flops=FLOPS,
    extremes=extremes(3),
    activations=(0,),
    calls=("moe_align", "gelu_and_mul"),
)  # fmt: skip
