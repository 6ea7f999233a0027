"""Axes, values and modules that the mixtures of experts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core.spec import Axis, Call, Expr, Sizes
from fastkernels.overrides.routing.cases import placement

MIXTRAL = {"experts": 8, "topk": 2, "hidden": 4096, "intermediate": 14336}
QWEN3_30B = {"experts": 128, "topk": 8, "hidden": 2048, "intermediate": 768}
ROUTING_BYTES = "4 * tokens * topk"
FLOPS = "6 * pairs * hidden * intermediate"


def per_expert(axes: str, condition: str = "") -> dict[str, str]:
    """Return the axes of a tensor with one entry per expert of this rank: `here` of them with an expert_map."""
    both = f"{condition} and " * bool(condition)
    return {f"{both}not elsewhere": f"experts {axes}", condition: f"here {axes}"}


def _here(sizes: Sizes) -> int:
    return (sizes["experts"] + 1) // 2 if sizes["elsewhere"] else sizes["experts"]


def _experts(args: SimpleNamespace) -> int:
    return args.w1.shape[0] if args.expert_map is None else args.expert_map.numel()


def _local_experts_of_pairs(args: SimpleNamespace) -> torch.Tensor:
    """Return the local index of each pair's expert, without the pairs of other ranks and of no expert."""
    ids = args.topk_ids.flatten().long()
    ids = ids[(ids >= 0) & (ids < _experts(args))]
    if args.expert_map is not None:
        ids = args.expert_map.long()[ids]
    return ids[ids >= 0]


AXES = {
    "tokens": Axis.per_call(),
    "experts": Axis.count(read=_experts),
    "topk": Axis.count(),
    "hidden": Axis.width(),
    "intermediate": Axis.width(),
    "here": Axis(_here, read=lambda a: None if a.expert_map is None else a.w1.shape[0], stated=True),
    "ids": Axis.dtype("int32"),
    # Few tokens do not reach all experts.
    "experts_hit": Axis.counted(
        lambda a: _local_experts_of_pairs(a).unique().numel(), Expr("min(here, tokens * topk)")
    ),
    "pairs": Axis.counted(lambda a: _local_experts_of_pairs(a).numel(), Expr("tokens * topk")),
}


def routing(call: Call) -> Mapping[str, torch.Tensor]:
    """OpSpec.values: the router's choice. With `elsewhere`, half of the experts are on another rank and the last token
    is padding."""
    experts = call["experts"]
    weights, ids = call.rand(call["tokens"], experts).topk(call["topk"], dim=-1)
    found = {"topk_weights": weights / weights.sum(dim=-1, keepdim=True)}
    if call["elsewhere"]:
        found["expert_map"] = placement(call, experts, call["here"])
        ids[-1:] = -1
    return {**found, "topk_ids": ids.to(getattr(torch, call["ids"]))}


def router_choice(
    tokens: int, experts: int, topk: int, skewed: bool, generator: torch.Generator, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return topk_weights and topk_ids [tokens, topk] of a random router.

    skewed: the hottest of 8 experts has 1.5 times the mean load, of 128 about 2.5 times, as trained routers have it
    (docs/reports/2026-11-routing.md).
    """
    logits = torch.randn(tokens, experts, generator=generator, device=device)
    if skewed:
        order = torch.randperm(experts, generator=generator, device=device)
        logits += torch.linspace(-0.6, 0.6, experts, device=device)[order]
    weights, ids = logits.softmax(-1).topk(topk)
    return weights / weights.sum(-1, keepdim=True), ids.int()


def extremes(weights_at: int) -> dict[str, Callable[[list[Any]], None]]:
    """Return OpSpec.extremes of an op with topk_weights at position `weights_at`, topk_ids behind it, and w1 at 1."""

    def one_expert(args: list[Any]) -> None:
        args[weights_at + 1].zero_()

    def empty_experts(args: list[Any]) -> None:
        args[weights_at + 1].remainder_(max(args[1].shape[0] // 2, 1))

    def no_weight(args: list[Any]) -> None:
        args[weights_at].zero_()

    return {"one_expert": one_expert, "empty_experts": empty_experts, "no_weight": no_weight}


def build(cls: type, args: list[Any]) -> Callable[[], Any]:
    """SPEC.build of `fused_experts`. Raises ValueError for arguments that the class cannot express."""
    defaults: tuple[Any, ...] = (None, False)
    x, w1, w2, weights, ids, expert_map, on_input = (*args, *defaults[len(args) - 5 :])
    return _made(cls, x, w1, w2, weights, ids, expert_map, on_input, None, False)


def build_fp8(cls: type, args: list[Any]) -> Callable[[], Any]:
    """SPEC.build of `fused_experts_fp8`. Raises ValueError for arguments that the class cannot express."""
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
        kernel.checked = True  # these weights are in the checkpoint's order
        kernel.scale_ue8m0 = ue8m0
        return lambda: kernel.apply(
            x, w1, w2, ids, weights, expert_map=expert_map, apply_router_weight_on_input=on_input
        )
    if expert_map is not None or ue8m0:
        raise ValueError(
            f"{cls.__name__} takes local expert ids without an expert_map, and no scales that are powers of two"
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
