"""vLLM's fused_experts, and the kernel object that its layers call: the op `fused_experts`, or `fused_experts_fp8` of
float8 weights.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.dispatch import Op
from fastkernels.overrides.moe.fused_experts_sglang import refuse


class MoEActivation(Enum):
    """vLLM's activations of which we have a kernel."""

    SILU = "silu"


_QUANT = (
    "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "ocp_mx_scheme", "w1_zp", "w2_zp", "w1_bias", "w2_bias",
    "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit",
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
    refuse_activation(activation)
    op, args = call_of(
        hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map, apply_router_weight_on_input,
        quant_config,
    )  # fmt: skip
    return op(*args)


def refuse_activation(activation: Any) -> None:
    """Raises ValueError for an activation of which we have no kernel."""
    name = getattr(activation, "value", activation)
    refuse(activation=None if name == "silu" else name)


def refuse_quant(quant_config: Any) -> bool:
    """Whether a FusedMoEQuantConfig, or None, is of float8. Raises ValueError for what we have no kernel for."""
    if quant_config is None:
        return False
    fp8 = bool(getattr(quant_config, "use_fp8_w8a8", False))
    names = _QUANT if fp8 else (*_QUANT, *_FP8)
    refuse(**{f"quant_config.{n}": getattr(quant_config, n, None) for n in names})
    return fp8


def call_of(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, global_num_experts: int, expert_map: torch.Tensor | None, on_input: bool,
    quant_config: Any, scale_ue8m0: bool = False,
) -> tuple[Op, tuple[Any, ...]]:  # fmt: skip
    """(the op that computes a call of vLLM's, its arguments). scale_ue8m0: of scales of groups. Raises ValueError."""
    if expert_map is not None and global_num_experts not in (-1, expert_map.numel()):
        raise ValueError(f"expert_map has {expert_map.numel()} entries for {global_num_experts} experts")
    if not refuse_quant(quant_config):
        args: tuple[Any, ...] = (hidden_states, w1, w2, topk_weights, topk_ids, expert_map, on_input)
        return registry.get("fused_experts").op, args
    given = {n: getattr(quant_config, n, None) for n in _FP8}
    args = (
        hidden_states, w1, w2, given["w1_scale"], given["w2_scale"], topk_weights, topk_ids, given["a1_scale"],
        given["a2_scale"], bool(given["per_act_token_quant"]), given["block_shape"],
        scale_ue8m0 and given["block_shape"] is not None, expert_map, on_input,
    )  # fmt: skip
    return registry.get("fused_experts_fp8").op, args


class VllmFusedMoEKernel:
    """vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEKernelModularImpl: what a layer calls with its
    weights, as they are, and its router's choice. Routing, shared experts and the all-reduce after it are the layer's.

    fused_experts.quant_config is read, all else of the two arguments is not. scale_ue8m0: whether scales of groups of
    activations are powers of two, which vLLM says for all of a process.
    """

    live_methods = ("apply",)
    scale_ue8m0 = False

    def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        activation: Any = MoEActivation.SILU,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `fused_experts`. Shared experts are not run here: of kernels of one rank the layer runs them itself.

        Raises ValueError for an activation, biases and a quantization of which we have no kernel.
        """
        refuse_activation(activation)
        op, args = call_of(
            hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map,
            apply_router_weight_on_input, self.fused_experts.quant_config, self.scale_ue8m0,
        )  # fmt: skip
        return op(*args)
