"""SPEC.build of mixtures of experts: the object that runs a host's layer. It keeps nothing of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


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
