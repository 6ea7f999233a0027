"""Cases and values that the mixtures of experts share: sizes of models, routing, other sizes, adversarial values."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core.shapes import drawn, dtype_name, optional, unless, varied
from fastkernels.core.spec import Case, OpSpec

MIXTRAL = {"experts": 8, "topk": 2, "hidden": 4096, "intermediate": 14336}
QWEN3_30B = {"experts": 128, "topk": 8, "hidden": 2048, "intermediate": 768}


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


def build(cls: type, args: list[Any]) -> Callable[[], Any]:
    """args: as of `fused_experts`. Raises ValueError for what the class cannot express."""
    defaults: tuple[Any, ...] = (None, False)
    x, w1, w2, weights, ids, expert_map, on_input = (*args, *defaults[len(args) - 5 :])
    return _made(cls, x, w1, w2, weights, ids, expert_map, on_input, None, False)


def build_fp8(cls: type, args: list[Any]) -> Callable[[], Any]:
    """args: as of `fused_experts_fp8`. Raises ValueError for what the class cannot express."""
    defaults: tuple[Any, ...] = (None, None, False, None, False, None, False)
    x, w1, w2, w1_scale, w2_scale, weights, ids, *rest = (*args, *defaults[len(args) - 7 :])
    a1_scale, a2_scale, per_token, block_shape, ue8m0, expert_map, on_input = rest
    quant = SimpleNamespace(
        use_fp8_w8a8=True, w1_scale=w1_scale, w2_scale=w2_scale, a1_scale=a1_scale, a2_scale=a2_scale,
        per_act_token_quant=per_token, block_shape=block_shape,
    )  # fmt: skip
    return _made(cls, x, w1, w2, weights, ids, expert_map, on_input, quant, ue8m0)


def _made(
    cls: Any,
    x: Any,
    w1: Any,
    w2: Any,
    weights: Any,
    ids: Any,
    expert_map: Any,
    on_input: bool,
    quant: Any,
    ue8m0: bool,
) -> Callable[[], Any]:
    if not hasattr(cls, "run"):
        kernel = cls(None, SimpleNamespace(quant_config=quant))
        kernel.scale_ue8m0 = ue8m0
        return lambda: kernel.apply(
            x, w1, w2, ids, weights, expert_map=expert_map, apply_router_weight_on_input=on_input
        )
    if expert_map is not None or ue8m0:
        raise ValueError(
            f"{cls.__name__}: its ids are those of experts here, and scales are no powers of two"
        )
    runner = cls("triton", SimpleNamespace(apply_router_weight_on_input=on_input))
    given = SimpleNamespace(
        w13_weight=w1, w2_weight=w2, use_fp8_w8a8=quant is not None, w13_scale=getattr(quant, "w1_scale", None),
        w2_scale=getattr(quant, "w2_scale", None), a13_scale=getattr(quant, "a1_scale", None),
        a2_scale=getattr(quant, "a2_scale", None), block_shape=getattr(quant, "block_shape", None),
        per_channel_quant=getattr(quant, "per_act_token_quant", False),
    )  # fmt: skip
    topk = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    dispatched = SimpleNamespace(hidden_states=x, topk_output=topk)
    return lambda: runner.run(dispatched, given).hidden_states
