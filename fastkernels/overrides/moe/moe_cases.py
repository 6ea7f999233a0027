"""What the SPECs of mixtures of experts share: routing of a case, its sizes, others like it, and hard values."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastkernels.core.shapes import drawn, dtype_name, optional, unless, varied
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.moe.moe_tiles import fits

MIXTRAL = {"experts": 8, "topk": 2, "hidden": 4096, "intermediate": 14336}
QWEN3_30B = {"experts": 128, "topk": 8, "hidden": 2048, "intermediate": 768}


def check_sizes(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> None:
    """Raise ValueError for tensors that do not fit each other."""
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


def local_ids(ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """ids: [T, K]. The numbers that the experts have here, -1 for those that are elsewhere."""
    ids = ids.long()
    if expert_map is None:
        return ids
    known = (ids >= 0) & (ids < expert_map.numel())
    return torch.where(known, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)


def here_of(dims: Mapping[str, Any]) -> int:
    """Experts of this rank."""
    experts = dims["experts"]
    return dims.get("here", (experts + 1) // 2 if dims.get("elsewhere") else experts)


def experts_read(dims: Mapping[str, Any]) -> int:
    """Every expert that has a token is read once; with few tokens not all have one."""
    return dims.get("experts_hit", min(here_of(dims), dims["tokens"] * dims["topk"]))


def flops(case: Case) -> int:
    d = case.dims
    return 6 * d.get("pairs", d["tokens"] * d["topk"]) * d["hidden"] * d["intermediate"]


def routing(
    dims: Mapping[str, Any], device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(topk_weights, topk_ids, expert_map) of a case."""
    e = dims["experts"]
    weights, ids = torch.rand(dims["tokens"], e, generator=generator, device=device).topk(
        dims["topk"], dim=-1
    )
    expert_map = None
    if dims.get("elsewhere"):  # every other expert is on another rank, and a padded token has none
        numbers = torch.arange(e, dtype=torch.int32, device=device)
        expert_map = torch.where((numbers % 2 == 0) & (numbers < 2 * here_of(dims)), numbers // 2, -1)
        ids[-1:] = -1
    ids = ids.to(getattr(torch, dims.get("ids", "int32")))
    return weights / weights.sum(dim=-1, keepdim=True), ids, expert_map


def sizes_of(
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    on_input: bool,
) -> dict[str, Any]:
    """The dims of a call, but for what is its op's own."""
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    ids = topk_ids.flatten().long()
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
            on_input=on_input, ids=unless(dtype_name(topk_ids.dtype), "int32"),
        ),
    }  # fmt: skip


def key_of(
    w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[tuple[int, ...], tuple[int]]:
    """The values of `SHAPE` and `SIZES`, for a Key."""
    here, hidden, intermediate = w2.shape
    experts = here if expert_map is None else expert_map.numel()
    tokens, topk = topk_ids.shape
    return (experts, here, topk, hidden, intermediate), (tokens,)


def fits_call(
    params: Mapping[str, str], shape: tuple[Any, ...], sizes: tuple[int], of_blocks: bool = False
) -> bool:
    """`Provider.fits`, by the key of a call."""
    experts, _, topk = shape[:3]
    return fits(params, sizes[0] * topk // experts, of_blocks)


# `here`: experts of this rank
SHAPE, SIZES = ("experts", "here", "topk", "hidden", "intermediate"), ("tokens",)


def dims_of_key(
    experts: int, here: int, topk: int, hidden: int, intermediate: int, tokens: int
) -> dict[str, Any]:
    """The dims of a case with that key."""
    elsewhere = {"elsewhere": True, "here": here} if here != experts else {}
    return {
        "tokens": tokens, "experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate, **elsewhere,
    }  # fmt: skip


def vary_experts(spec: OpSpec, case: Case, rng: random.Random) -> Case:
    """OpSpec.vary. Widths of which 128 share a scale stay multiples of that."""
    step = max(case.dims.get("block", 1), 1)

    def draw() -> dict[str, Any]:
        new = drawn(case, rng, ("tokens", "experts", "topk"), ("hidden", "intermediate"))
        wide = {name: max(new[name] // step, 1) * step for name in ("hidden", "intermediate")}
        topk = min(new["topk"], new["experts"])
        return {**new, **wide, "topk": topk, "experts_hit": None, "pairs": None, "here": None}

    return varied(case, draw, spec.bytes_moved, spec.flops)


def extremes(weights_at: int) -> dict[str, Callable[[list[Any]], None]]:
    """OpSpec.extremes of an op whose topk_weights are argument `weights_at`, topk_ids the next one, w1 the second."""

    def one_expert(args: list[Any]) -> None:
        args[weights_at + 1].zero_()

    def empty_experts(args: list[Any]) -> None:
        args[weights_at + 1].remainder_(max(args[1].shape[0] // 2, 1))

    def no_weight(args: list[Any]) -> None:
        args[weights_at].zero_()

    return {"one_expert": one_expert, "empty_experts": empty_experts, "no_weight": no_weight}
