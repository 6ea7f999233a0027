"""Mixture of experts: a weighted sum of gated MLPs, y = sum w (silu(x Wg^T) * (x Wu^T)) Wd^T (arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.dispatch import Key, Provider, define
from fastkernels.core.spec import Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.moe.cases import (
    AXES,
    FLOPS,
    ROUTING_BYTES,
    build,
    extremes,
    per_expert,
    routing,
)
from fastkernels.overrides.moe.expert_libraries import for_any_ids, fused_experts_vllm, supports_vllm
from fastkernels.overrides.moe.few_pairs import PARAMS as FEW_PARAMS
from fastkernels.overrides.moe.few_pairs import few_pairs, unsupported_few
from fastkernels.overrides.moe.grouped_gemm import grouped_gemm, sum_over_experts
from fastkernels.overrides.moe.moe_tiles import chosen, fits, sets, tiles, wide
from fastkernels.overrides.moe.selection import propose_experts
from fastkernels.overrides.routing.sorted_pairs import sort_pairs

# The key of a call in tuned tables; `here` is the number of experts on this rank.
SHAPE, SIZES = ("experts", "here", "topk", "hidden", "intermediate"), ("tokens",)
# Numbers of tokens at which a patch measures the experts, the most frequent first
POINTS = (1,), (8,), (32,), (64,), (2048,), (256,), (8192,)


def check_sizes(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> None:
    """Raise ValueError for tensors whose shapes do not match."""
    if w1.dim() != 3 or w2.dim() != 3 or w1.shape[1] % 2 or w1.shape[::2] != w2.shape[:2]:
        raise ValueError(f"w1 {tuple(w1.shape)} must be [E, 2 I, H] and w2 {tuple(w2.shape)} [E, H, I]")
    if w1.shape[1] != 2 * w2.shape[2]:
        raise ValueError(f"w1 has {w1.shape[1]} rows per expert, not twice the {w2.shape[2]} columns of w2")
    if x.dim() != 2 or x.shape[1] != w1.shape[2]:
        raise ValueError(f"hidden_states {tuple(x.shape)} must be [tokens, {w1.shape[2]}], as in w1")
    if ids.dim() != 2 or weights.shape != ids.shape or len(ids) != len(x):
        raise ValueError(
            f"topk_weights {tuple(weights.shape)} and topk_ids {tuple(ids.shape)} must both be"
            f" [{x.shape[0]}, experts per token]"
        )


def local_ids(ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Return the local indices of ids [T, K]: -1 for experts on other ranks."""
    ids = ids.long()
    if expert_map is None:
        return ids
    known = (ids >= 0) & (ids < expert_map.numel())
    return torch.where(known, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)


def on_own_rows(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None,
    experts: int, mlp: Callable[[int, torch.Tensor], torch.Tensor], on_input: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Add up mlp(expert, rows) of all experts, each on its own rows. Reads the ids on the host: for the CPU only."""
    ids, dtype = local_ids(topk_ids, expert_map), hidden_states.dtype
    out = torch.zeros(hidden_states.shape, dtype=torch.promote_types(dtype, torch.float32))
    for expert in ids.unique().tolist():
        if not 0 <= expert < experts:
            continue
        tokens, choice = torch.where(ids == expert)
        scale, x = topk_weights[tokens, choice, None].to(out.dtype), hidden_states[tokens]
        y = mlp(expert, (x * scale).to(dtype) if on_input else x).to(out.dtype)
        out.index_add_(0, tokens, y if on_input else y * scale)
    return out.to(dtype)


def weighted_sum(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None,
    experts: int, mlp: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Add up mlp(expert, x) of all experts for all rows, times their weights: the frame of references."""
    acc = torch.promote_types(hidden_states.dtype, torch.float32)
    x, weights, ids = hidden_states.to(acc), topk_weights.to(acc), local_ids(topk_ids, expert_map)
    out = torch.zeros_like(x)
    for expert in range(experts):
        scale = torch.where(ids == expert, weights, 0).sum(1, keepdim=True)
        out += torch.where(scale != 0, scale * mlp(expert, x), 0)
    return out.to(hidden_states.dtype)


def reference(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """hidden_states: [T, H]; w1: [E, 2 I, H], gate rows first; w2: [E, H, I]; topk_weights, topk_ids: [T, K].

    Returns [T, H] in hidden_states' dtype. Pairs without an expert on this rank contribute 0. expert_map [experts of
    all ranks] holds the local index of each expert, -1 for experts on other ranks. With apply_router_weight_on_input
    the weights multiply the input of the experts instead of their output. The first product and its activation are
    rounded to hidden_states' dtype, as in production's kernels: in float16 they may overflow.
    """
    dtype = hidden_states.dtype
    acc = torch.promote_types(dtype, torch.float32)
    x, weights, ids = hidden_states.to(acc), topk_weights.to(acc), local_ids(topk_ids, expert_map)
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        for k in range(ids.shape[1]):
            scale = torch.where(ids[:, k] == expert, weights[:, k], 0)[:, None]
            inner = x * scale if apply_router_weight_on_input else x
            gate, up = (inner @ w1[expert].to(acc).t()).to(dtype).chunk(2, dim=-1)
            y = (F.silu(gate) * up).to(acc) @ w2[expert].to(acc).t()
            out += torch.where(scale != 0, y if apply_router_weight_on_input else scale * y, 0)
    return out.to(dtype)


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
        return "Triton's interpreter computes tl.dot of bfloat16 on its bits as integers"
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
    gate_up: str | None = None,
    down: str | None = None,
) -> torch.Tensor:
    """gate_up, down: tiles of the two products as a tuned table names them; None: the kernel's default."""
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
    x = hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()
    ids, scale = topk_ids.contiguous(), topk_weights.contiguous()
    if ids.numel() == 0 or x.shape[1] == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    own = tiles(ids.numel() // experts, x.dtype, wide(x.device))
    first, second = chosen(own, gate_up, down)
    pairs = sort_pairs(ids, experts, expert_map, first.block_m)
    early, late = (scale, None) if apply_router_weight_on_input else (None, scale)
    inner = silu_and_mul.run(grouped_gemm(x, w1, pairs, pairs.topk, early, first))
    out = grouped_gemm(inner, w2, pairs, 1, late, second)
    return sum_over_experts(out, ids, experts, expert_map)


def _supports_few(
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
    return unsupported_few(hidden_states, w1, w2, topk_ids)


def _few(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    columns: int = 16,
    depth: int = 256,
    num_warps: int = 4,
) -> torch.Tensor:
    """columns, depth, num_warps: one of few_pairs.PARAMS."""
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
    routed = (topk_weights, topk_ids, expert_map, apply_router_weight_on_input)
    return few_pairs(hidden_states, w1, w2, *routed, columns, depth, num_warps)


def _torch(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)

    def mlp(expert: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(silu_and_mul.run(F.linear(x, w1[expert])), w2[expert])

    routed = (topk_weights, topk_ids, expert_map, w1.shape[0])
    return on_own_rows(hidden_states, *routed, mlp, apply_router_weight_on_input)


def _reference(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
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


def key_of(
    w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[tuple[int, ...], tuple[int]]:
    """Return the values of SHAPE and SIZES of a call."""
    here, hidden, intermediate = w2.shape
    experts = here if expert_map is None else expert_map.numel()
    tokens, topk = topk_ids.shape
    return (experts, here, topk, hidden, intermediate), (tokens,)


def fits_call(
    params: Mapping[str, str], shape: tuple[Any, ...], sizes: tuple[int], of_blocks: bool = False
) -> bool:
    """Return Provider.fits for the key of a call."""
    experts, _, topk = shape[:3]
    return fits(params, sizes[0] * topk // experts, of_blocks)


def dims_of_key(
    experts: int, here: int, topk: int, hidden: int, intermediate: int, tokens: int
) -> dict[str, Any]:
    """Return the dims of a case with this key."""
    elsewhere = {"elsewhere": True, "here": here} if here != experts else {}
    return {
        "tokens": tokens, "experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate, **elsewhere,
    }  # fmt: skip


def _key(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> tuple[tuple[Any, ...], tuple[int]]:
    shape, sizes = key_of(w1, w2, topk_ids, expert_map)
    return (*shape, hidden_states.dtype), sizes


fused_experts = define(
    "fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
    " Tensor? expert_map=None, bool apply_router_weight_on_input=False) -> Tensor",
    fake=_fake,
    providers=(
        Provider(
            "triton", _triton, devices=("cuda",), supports=_supports_triton, params=sets(2),
            fits=lambda params, *args: fits_call(params, *_key(*args)),
        ),
        # The next two run only where a table or a measurement names them.
        Provider(
            "triton-few", _few, devices=("cuda",), supports=_supports_few, params=FEW_PARAMS,
            fits=lambda params, *args: _supports_few(*args) is None,
        ),
        Provider("vllm", for_any_ids(fused_experts_vllm, 3), module="vllm", supports=supports_vllm),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
    key=Key(
        shape=(*SHAPE, "dtype"), sizes=SIZES, of=_key, dims=lambda dtype, **sizes: dims_of_key(**sizes),
        propose=propose_experts, points=POINTS,
    ),
)  # fmt: skip


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


SPEC = OpSpec(
    name="fused_experts",
    level=2,
    by_default=True,
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
    arguments=(
        Tensor("hidden_states", "tokens hidden"),
        Tensor(
            "w1",
            per_expert("2*intermediate hidden"),
            values=fan_in,
            bytes="itemsize(dtype) * experts_hit * 2 * intermediate * hidden",
        ),
        Tensor(
            "w2",
            per_expert("hidden intermediate"),
            values=fan_in,
            bytes="itemsize(dtype) * experts_hit * hidden * intermediate",
        ),
        Tensor("topk_weights", "tokens topk", "float32"),
        Tensor("topk_ids", "tokens topk", "ids", bytes=ROUTING_BYTES),
        Tensor("expert_map", "experts", "int32", when="elsewhere", bytes="0"),
        Scalar("apply_router_weight_on_input", "on_input", default=False),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes=AXES,
    constraints=("topk <= experts",),
    values=routing,
    flops=FLOPS,
    extremes=extremes(3),
    activations=(0,),
    calls=("moe_align", "silu_and_mul"),
    by_table=fused_experts,
    build=build,
)
