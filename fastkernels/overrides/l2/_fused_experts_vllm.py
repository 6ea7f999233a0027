"""vLLM's fused_experts; what it computes is the op `fused_experts`, or `fused_experts_fp8` of float8 weights."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from fastkernels import registry
from fastkernels.overrides.l2._fused_experts_sglang import refuse


class MoEActivation(Enum):
    """vLLM's activations of which we have a kernel."""

    SILU = "silu"


_QUANT = (
    "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "ocp_mx_scheme", "w1_zp", "w2_zp", "w1_bias", "w2_bias",
)  # fmt: skip
_FP8 = ("quant_dtype", "w1_scale", "w2_scale", "a1_scale", "a2_scale", "block_shape", "per_act_token_quant")


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
    """vllm.model_executor.layers.fused_moe.fused_moe.fused_experts; shapes as in the ops' references.

    quant_config: None, or a FusedMoEQuantConfig of float8 e4m3 weights and activations (use_fp8_w8a8). Raises
    ValueError for another activation and for a quant_config that quantizes otherwise or has biases.
    """
    name = getattr(activation, "value", activation)
    refuse(activation=None if name == "silu" else name)
    given = {n: getattr(quant_config, n, None) for n in _FP8}
    fp8 = bool(getattr(quant_config, "use_fp8_w8a8", False))
    if quant_config is not None:
        rest = {n: getattr(quant_config, n, None) for n in _QUANT}
        refuse(**{f"quant_config.{n}": value for n, value in {**rest, **({} if fp8 else given)}.items()})
    if expert_map is not None and global_num_experts not in (-1, expert_map.numel()):
        raise ValueError(f"expert_map has {expert_map.numel()} entries for {global_num_experts} experts")
    if fp8:
        return registry.get("fused_experts_fp8").op(
            hidden_states, w1, w2, given["w1_scale"], given["w2_scale"], topk_weights, topk_ids, given["a1_scale"],
            given["a2_scale"], bool(given["per_act_token_quant"]), given["block_shape"], False, expert_map,
            apply_router_weight_on_input,
        )  # fmt: skip
    return registry.get("fused_experts").op(
        hidden_states, w1, w2, topk_weights, topk_ids, expert_map, apply_router_weight_on_input
    )
