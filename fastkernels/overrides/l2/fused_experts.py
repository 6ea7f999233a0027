"""Mixture of experts: a weighted sum of gated MLPs, y = sum w (silu(x Wg^T) * (x Wu^T)) Wd^T (arXiv 1701.06538)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.dispatch import Provider, define
from fastkernels.overrides.l1.moe_align import moe_align, padded_size
from fastkernels.overrides.l1.silu_and_mul import silu_and_mul
from fastkernels.overrides.l2._fused_experts_sglang import (
    refuse,
    sglang_fused_experts,
    sglang_fused_experts_0_5_16,
    sglang_fused_experts_0_5_17,
)
from fastkernels.overrides.l2._grouped_gemm import grouped_gemm, sum_over_experts, tiles, wide
from fastkernels.shapes import drawn, dtype_name, optional, unless, varied
from fastkernels.spec import Case, OpSpec, Target

__all__ = [
    "SPEC",
    "MoEActivation",
    "fused_experts",
    "reference",
    "sglang_fused_experts",
    "sglang_fused_experts_0_5_16",
    "sglang_fused_experts_0_5_17",
    "vllm_fused_experts",
]


def reference(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """hidden_states: [T, H]; w1: [E, 2 I, H], the gates' rows first; w2: [E, H, I]; topk_weights, topk_ids: [T, K].

    Returns [T, H] in hidden_states' dtype. Pairs whose id is not of an expert here count nothing; expert_map
    [experts of all ranks] gives each one's number here, -1 for those that are elsewhere.
    apply_router_weight_on_input: the weights multiply the input of the experts, not what comes out of them.
    """
    acc = torch.promote_types(hidden_states.dtype, torch.float32)
    x, weights, ids = hidden_states.to(acc), topk_weights.to(acc), topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(known, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        for k in range(ids.shape[1]):
            scale = torch.where(ids[:, k] == expert, weights[:, k], 0)[:, None]
            inner = x * scale if apply_router_weight_on_input else x
            gate, up = (inner @ w1[expert].to(acc).t()).chunk(2, dim=-1)
            y = (F.silu(gate) * up) @ w2[expert].to(acc).t()
            out += torch.where(scale != 0, y if apply_router_weight_on_input else scale * y, 0)
    return out.to(hidden_states.dtype)


def _check(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> None:
    if w1.dim() != 3 or w2.dim() != 3 or w1.shape[1] % 2 or w1.shape[::2] != w2.shape[:2]:
        raise ValueError(f"w1 {tuple(w1.shape)} must be [E, 2 I, H] and w2 {tuple(w2.shape)} [E, H, I]")
    if w1.shape[1] != 2 * w2.shape[2]:
        raise ValueError(f"w1 has {w1.shape[1]} rows an expert, w2 {w2.shape[2]} columns: not twice as many")
    if x.dim() != 2 or x.shape[1] != w1.shape[2]:
        raise ValueError(f"hidden_states {tuple(x.shape)} must be [tokens, {w1.shape[2]}], as w1 has it")
    if ids.dim() != 2 or weights.shape != ids.shape or len(ids) != len(x):
        raise ValueError(
            f"topk_weights {tuple(weights.shape)} and topk_ids {tuple(ids.shape)} must both be"
            f" [{x.shape[0]}, experts of a token]"
        )


def _supports_triton(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> str | None:
    if hidden_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {hidden_states.dtype} is not float32, float16 or bfloat16"
    if hidden_states.dtype == torch.bfloat16 and hidden_states.device.type == "cpu":
        return "Triton's interpreter takes the bits of bfloat16 for integers in tl.dot"
    for name, w in (("w1", w1), ("w2", w2)):
        if w.dtype != hidden_states.dtype:
            return f"{name} is {w.dtype}, hidden_states {hidden_states.dtype}"
        if w.stride(-1) != 1:
            return f"{name} has strides {tuple(w.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    _check(hidden_states, w1, w2, topk_weights, topk_ids)
    x = hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()
    ids, scale = topk_ids.contiguous(), topk_weights.contiguous()
    pairs, topk = ids.numel(), ids.shape[1]
    if pairs == 0 or x.shape[1] == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    t = tiles(pairs // experts, x.dtype, wide(x.device))
    # Every size depends on shapes only: nothing waits for the GPU, and a CUDA graph serves any routing.
    capacity = -(-padded_size(pairs, t.block_m, experts) // t.block_m) * t.block_m
    aligned = moe_align.run(ids, t.block_m, experts, capacity, expert_map, False)
    early, late = (scale, None) if apply_router_weight_on_input else (None, scale)
    gate_up = grouped_gemm(x, w1, aligned, pairs, topk, early, t)
    down = grouped_gemm(silu_and_mul.run(gate_up), w2, aligned, pairs, 1, late, t)
    return sum_over_experts(down, ids, experts, expert_map)


def _torch(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """One expert after the other, on the rows that are its own. It looks at the ids: on the CPU only."""
    _check(hidden_states, w1, w2, topk_weights, topk_ids)
    ids = topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(known, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)
    out = torch.zeros(hidden_states.shape, dtype=torch.promote_types(hidden_states.dtype, torch.float32))
    for expert in ids.unique().tolist():
        if not 0 <= expert < w1.shape[0]:
            continue
        tokens, choice = torch.where(ids == expert)
        scale = topk_weights[tokens, choice, None].to(out.dtype)
        x = hidden_states[tokens]
        if apply_router_weight_on_input:
            x, scale = (x * scale).to(x.dtype), torch.ones_like(scale)
        y = F.linear(silu_and_mul.run(F.linear(x, w1[expert])), w2[expert])
        out.index_add_(0, tokens, y.to(out.dtype) * scale)
    return out.to(hidden_states.dtype)


def _reference(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    _check(hidden_states, w1, w2, topk_weights, topk_ids)
    return reference(hidden_states, w1, w2, topk_weights, topk_ids, expert_map, apply_router_weight_on_input)


def _fake(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    return torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)


fused_experts = define(
    "fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
    " Tensor? expert_map=None, bool apply_router_weight_on_input=False) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


class MoEActivation(Enum):
    """vLLM's activations of which we have a kernel."""

    SILU = "silu"


_QUANT = (
    "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "ocp_mx_scheme", "quant_dtype",
    "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "block_shape", "w1_bias", "w2_bias",
)  # fmt: skip


def vllm_fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any = MoEActivation.SILU,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    quant_config: Any = None,
) -> torch.Tensor:
    """vllm.model_executor.layers.fused_moe.fused_moe.fused_experts without quantization; shapes as in `reference`.

    Raises ValueError for another activation and for a quant_config that quantizes or has biases.
    """
    name = getattr(activation, "value", activation)
    refuse(activation=None if name == "silu" else name)
    if quant_config is not None:
        refuse(**{f"quant_config.{n}": getattr(quant_config, n, None) for n in _QUANT})
    if expert_map is not None and global_num_experts not in (-1, expert_map.numel()):
        raise ValueError(f"expert_map has {expert_map.numel()} entries for {global_num_experts} experts")
    return fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, expert_map, apply_router_weight_on_input
    )


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    dtype, t, e, h, i = getattr(torch, case.dtype), d["tokens"], d["experts"], d["hidden"], d["intermediate"]

    def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(size, dtype=dtype, device=device)  # in place: Mixtral's experts are 1.4 G numbers
        return made.normal_(0.0, scale, generator=generator)

    weights, ids = torch.rand(t, e, generator=generator, device=device).topk(d["topk"], dim=-1)
    expert_map = None
    if d.get("elsewhere"):  # every other expert is on another rank, and a padded token has none
        numbers, here = torch.arange(e, dtype=torch.int32, device=device), _here(d)
        expert_map = torch.where((numbers % 2 == 0) & (numbers < 2 * here), numbers // 2, -1)
        ids[-1:], e = -1, here
    return [
        randn(t, h), randn(e, 2 * i, h, scale=1 / math.sqrt(h)), randn(e, h, i, scale=1 / math.sqrt(i)),
        weights / weights.sum(dim=-1, keepdim=True), ids.to(getattr(torch, d.get("ids", "int32"))), expert_map,
        d.get("on_input", False),
    ]  # fmt: skip


def _here(dims: Mapping[str, Any]) -> int:
    """Experts of this rank."""
    experts = dims["experts"]
    return dims.get("here", (experts + 1) // 2 if dims.get("elsewhere") else experts)


def _dims(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> dict[str, Any]:
    ids, experts = topk_ids.flatten().long(), w1.shape[0] if expert_map is None else expert_map.numel()
    ids = ids[(ids >= 0) & (ids < experts)]
    if expert_map is not None:
        ids = expert_map.long()[ids]
    ids = ids[ids >= 0]
    tokens, topk = topk_ids.shape
    return {
        "tokens": tokens, "experts": experts, "topk": topk, "hidden": w2.shape[1], "intermediate": w2.shape[2],
        "experts_hit": ids.unique().numel(), "pairs": ids.numel(),
        **optional(
            elsewhere=expert_map is not None, here=w1.shape[0] if expert_map is not None else None,
            on_input=apply_router_weight_on_input, ids=unless(dtype_name(topk_ids.dtype), "int32"),
        ),
    }  # fmt: skip


def vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        new = drawn(case, rng, ("tokens", "experts", "topk"), ("hidden", "intermediate"))
        topk = min(new["topk"], new["experts"])
        return {**new, "topk": topk, "experts_hit": None, "pairs": None, "here": None}

    return varied(case, draw, SPEC.bytes_moved, SPEC.flops)


def _one_expert(args: list[Any]) -> None:
    args[4].zero_()


def _empty_experts(args: list[Any]) -> None:
    args[4].remainder_(max(args[1].shape[0] // 2, 1))


def _no_weight(args: list[Any]) -> None:
    args[3].zero_()


def _bytes(case: Case) -> int:
    """Every expert that has a token is read once; with few tokens not all have one."""
    d, size = case.dims, getattr(torch, case.dtype).itemsize
    experts = d.get("experts_hit", min(_here(d), d["tokens"] * d["topk"]))
    return (
        size * d["hidden"] * (2 * d["tokens"] + 3 * experts * d["intermediate"]) + 8 * d["tokens"] * d["topk"]
    )


def _flops(case: Case) -> int:
    d = case.dims
    return 6 * d.get("pairs", d["tokens"] * d["topk"]) * d["hidden"] * d["intermediate"]


def _case(
    name: str, tokens: int, experts: int, topk: int, hidden: int, intermediate: int, tag: str,
    dtype: str = "bfloat16", **more: bool,
) -> Case:  # fmt: skip
    dims = {
        "tokens": tokens,
        "experts": experts,
        "topk": topk,
        "hidden": hidden,
        "intermediate": intermediate,
    }
    return Case(name, {**dims, **more}, dtype, tags=(tag,))


_VLLM = "vllm.model_executor.layers.fused_moe.fused_moe:fused_experts"
_SGLANG = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe:fused_experts"
_NOTE = "the hosts reach it through objects that bind it when they are built: for forks and for our engine"

SPEC = OpSpec(
    name="fused_experts",
    level=2,
    reference=reference,
    op=fused_experts,
    cases=(
        _case("decode_1", 1, 8, 2, 4096, 14336, "model"),
        _case("decode_32", 32, 8, 2, 4096, 14336, "model"),
        _case("decode_256", 256, 8, 2, 4096, 14336, "model"),
        _case("prefill_4k", 4096, 8, 2, 4096, 14336, "model"),
        _case("odd_63", 63, 5, 2, 72, 130, "odd"),
        _case("one", 1, 1, 1, 1, 1, "odd", "float32"),
        _case("odd_5", 5, 12, 3, 100, 63, "odd", "float32"),
        _case("elsewhere", 19, 7, 3, 64, 48, "odd", "float32", elsewhere=True),
        _case("on_input", 9, 3, 1, 40, 24, "odd", "float16", on_input=True),
        _case("all", 70, 2, 2, 65, 33, "odd", "float32"),
        _case("none", 0, 4, 2, 64, 48, "odd", "float32"),
    ),
    inputs=_inputs,
    bytes_moved=_bytes,
    flops=_flops,
    dims_of=_dims,
    vary=vary,
    extremes={"one_expert": _one_expert, "empty_experts": _empty_experts, "no_weight": _no_weight},
    activations=(0,),
    calls=("moe_align", "silu_and_mul"),
    targets=(
        Target("vllm", _VLLM, "vllm_fused_experts", "function", note=_NOTE),
        Target("sglang", _SGLANG, "sglang_fused_experts_0_5_16", "function", "<0.5.17", note=_NOTE),
        Target("sglang", _SGLANG, "sglang_fused_experts_0_5_17", "function", ">=0.5.17,<0.5.23", note=_NOTE),
        Target("sglang", _SGLANG, "sglang_fused_experts", "function", ">=0.5.23", note=_NOTE),
    ),
)
