"""vLLM's classes and functions for mixtures of experts: routers, the sort by expert, experts, and Mixtral's block."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import Op
from fastkernels.core.spec import Target
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear
from fastkernels.overrides.moe.arguments import check_tokens, refuse
from fastkernels.overrides.moe.fused_experts import fused_experts
from fastkernels.overrides.moe.fused_experts_fp8 import fused_experts_fp8
from fastkernels.overrides.moe.grouped_topk import Pair, grouped_topk
from fastkernels.overrides.moe.moe_align import Aligned, moe_align, padded_size
from fastkernels.overrides.moe.moe_sum import moe_sum
from fastkernels.overrides.moe.sparse_moe import Experts, SparseMoE
from fastkernels.overrides.moe.topk_softmax import topk_softmax


def vllm_fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vllm.model_executor.layers.fused_moe.router.fused_topk_router.fused_topk, for softmax scores.

    hidden_states: [T, H], of which only T is read; gating_output: [T, E]. Returns (weights, ids, token_expert_indices),
    each [T, topk]; ids are in indices_type, by default int32. Raises ValueError for another scoring_func.
    """
    check_tokens(hidden_states, gating_output)
    refuse("fused_topk", scoring_func=None if scoring_func == "softmax" else scoring_func)
    weights, ids, pairs = topk_softmax(gating_output, topk, renormalize)
    return weights, ids if indices_type is None else ids.to(indices_type), pairs


def vllm_grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> Pair:
    """vllm.model_executor.layers.fused_moe.router.grouped_topk_router.grouped_topk: (weights, ids), each [T, topk]."""
    check_tokens(hidden_states, gating_output)
    return grouped_topk(
        gating_output, topk, renormalize, num_expert_group, topk_group, scoring_func, e_score_correction_bias,
        routed_scaling_factor,
    )  # fmt: skip


def vllm_fused_grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    e_score_correction_bias: torch.Tensor,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
) -> Pair:
    """vllm.model_executor.layers.fused_moe.router.grouped_topk_router.fused_grouped_topk; see vllm_grouped_topk."""
    groups = (num_expert_group, topk_group, scoring_func, routed_scaling_factor, e_score_correction_bias)
    return vllm_grouped_topk(hidden_states, gating_output, topk, renormalize, *groups)


class VllmGroupedTopk(nn.Module):
    """vllm.model_executor.layers.fused_moe.router.grouped_topk_router.GroupedTopk; see vllm_grouped_topk.

    num_fused_shared_experts is ignored, as in vLLM on NVIDIA GPUs.
    """

    def __init__(
        self,
        topk: int,
        renormalize: bool,
        num_expert_group: int = 0,
        topk_group: int = 0,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        num_fused_shared_experts: int = 0,
    ) -> None:
        super().__init__()
        self.topk = topk
        self.renormalize = renormalize
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.scoring_func = scoring_func
        self.routed_scaling_factor = routed_scaling_factor
        self.num_fused_shared_experts = num_fused_shared_experts

    def forward(
        self,
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        e_score_correction_bias: torch.Tensor | None = None,
    ) -> Pair:
        return vllm_grouped_topk(
            hidden_states, gating_output, self.topk, self.renormalize, self.num_expert_group, self.topk_group,
            self.scoring_func, self.routed_scaling_factor, e_score_correction_bias,
        )  # fmt: skip


def vllm_moe_align_block_size_0_26(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> Aligned:
    """vllm.model_executor.layers.fused_moe.moe_align_block_size.moe_align_block_size of 0.26.

    With an expert_map, the pairs of experts on other ranks are dropped (ignore_invalid_experts) or kept in blocks whose
    entry in expert_ids is -1. The pairs of an expert are in order, which vLLM does not guarantee.
    """
    capacity = padded_size(topk_ids.numel(), block_size, num_experts)
    if pad_sorted_ids:
        capacity = -(-capacity // block_size) * block_size
    leave_out = expert_map if ignore_invalid_experts else None
    sorted_ids, expert_ids, total = moe_align(topk_ids, block_size, num_experts, capacity, leave_out, False)
    if expert_map is not None and not ignore_invalid_experts:
        expert_ids = expert_map[expert_ids]
    return sorted_ids, expert_ids, total


def vllm_moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> Any:
    """vllm.model_executor.layers.fused_moe.moe_align_block_size.moe_align_block_size since 0.32.

    return_scatter_idx adds a fourth result, [T * K, 1] int32: the index of each pair, -1 for dropped pairs.
    """
    if return_scatter_idx and expert_map is not None and not ignore_invalid_experts:
        raise ValueError("return_scatter_idx with an expert_map needs ignore_invalid_experts=True")
    found = vllm_moe_align_block_size_0_26(
        topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts
    )
    if not return_scatter_idx:
        return found
    flat = topk_ids.flatten()
    valid = (flat >= 0) & (flat < num_experts)
    if expert_map is not None:
        valid &= expert_map[flat.clamp(0, num_experts - 1).long()] >= 0
    pairs = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    return (*found, torch.where(valid, pairs, -1).view(-1, 1))


def vllm_moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """vllm._custom_ops.moe_sum: write the sum over K of input [T, K, H] to output [T, H]."""
    moe_sum(input, output, None, topk_ids, expert_map)


def vllm_moe_fused_mul_sum_0_26(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """vllm.model_executor.layers.fused_moe.moe_fused_mul_sum.moe_fused_mul_sum of 0.26: the weighted sum [T, H]."""
    if outputs is None:
        outputs = torch.empty((inputs.shape[0], inputs.shape[2]), dtype=inputs.dtype, device=inputs.device)
    moe_sum(inputs, outputs, topk_weights, topk_ids, expert_map)
    return outputs


def vllm_moe_fused_mul_sum(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    num_valid_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """vllm.model_executor.layers.fused_moe.moe_fused_mul_sum.moe_fused_mul_sum since 0.32: the weighted sum [T, H].

    A token without any valid id becomes 0; vLLM leaves its memory unchanged. Raises ValueError for num_valid_tokens.
    """
    if num_valid_tokens is not None:
        refuse("moe_fused_mul_sum", num_valid_tokens=num_valid_tokens)
    return vllm_moe_fused_mul_sum_0_26(inputs, topk_weights, outputs, topk_ids, expert_map)


class MoEActivation(Enum):
    """The activations of vLLM's enum that our kernels compute."""

    SILU = "silu"


# Fields of a FusedMoEQuantConfig: unsupported ones, and those that only float8 weights may set.
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
    """vllm.model_executor.layers.fused_moe.fused_moe.fused_experts; the ops' references document the shapes.

    quant_config: None, or a FusedMoEQuantConfig with float8 e4m3 weights and activations (use_fp8_w8a8). Raises
    ValueError for other activations, other quantization schemes and biases.
    """
    refuse_activation(activation)
    op, args = call_of(
        hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map, apply_router_weight_on_input,
        quant_config,
    )  # fmt: skip
    return op(*args)


def refuse_activation(activation: Any) -> None:
    """Raise ValueError unless the activation is silu."""
    name = getattr(activation, "value", activation)
    refuse("fused_experts", activation=None if name == "silu" else name)


def refuse_quant(quant_config: Any) -> bool:
    """Return whether a FusedMoEQuantConfig (or None) means float8. Raises ValueError for other schemes and biases."""
    if quant_config is None:
        return False
    fp8 = bool(getattr(quant_config, "use_fp8_w8a8", False))
    names = _QUANT if fp8 else (*_QUANT, *_FP8)
    refuse("fused_experts", **{f"quant_config.{n}": getattr(quant_config, n, None) for n in names})
    return fp8


def call_of(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, global_num_experts: int, expert_map: torch.Tensor | None, on_input: bool,
    quant_config: Any, scale_ue8m0: bool = False,
) -> tuple[Op, tuple[Any, ...]]:  # fmt: skip
    """Return (op, arguments of the op) for a call of vLLM's fused_experts. Raises ValueError for unsupported calls.

    scale_ue8m0: the scales of activation groups are powers of two.
    """
    if expert_map is not None and global_num_experts not in (-1, expert_map.numel()):
        raise ValueError(f"expert_map has {expert_map.numel()} entries for {global_num_experts} experts")
    if not refuse_quant(quant_config):
        args: tuple[Any, ...] = (hidden_states, w1, w2, topk_weights, topk_ids, expert_map, on_input)
        return fused_experts, args
    given = {n: getattr(quant_config, n, None) for n in _FP8}
    args = (
        hidden_states, w1, w2, given["w1_scale"], given["w2_scale"], topk_weights, topk_ids, given["a1_scale"],
        given["a2_scale"], bool(given["per_act_token_quant"]), given["block_shape"],
        scale_ue8m0 and given["block_shape"] is not None, expert_map, on_input,
    )  # fmt: skip
    return fused_experts_fp8, args


# vLLM's experts that read weights in the checkpoint's order ([E, 2 I, H] with the gates first, [E, H, I]), and the
# exchange of tokens that leaves them where they are
_PLAIN = ("TritonExperts", "TritonOrCutlassExperts", "MoEPrepareAndFinalizeNoDPEPModular")


def refuse_parts(*parts: Any) -> None:
    """Raise ValueError for experts that order their weights in another way, or for an exchange between ranks."""
    for name in (type(part).__name__ for part in parts):
        if name not in _PLAIN:
            raise ValueError(f"fused_experts: {name} is not one of {', '.join(_PLAIN)}")


class VllmFusedMoEKernel:
    """vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEKernelModularImpl: computes the experts of a layer.

    The layer passes its weights and the router's choice; routing, shared experts and the final all-reduce stay in the
    layer. scale_ue8m0: the scales of activation groups are powers of two, a setting of the whole vLLM process.
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
        """Compute `fused_experts`; on a single rank the layer itself runs the shared experts.

        Raises ValueError for unsupported activations, biases, quantization schemes and orders of the weights.
        """
        refuse_activation(activation)
        if not getattr(self, "checked", False):  # a live patch has checked the layer
            refuse_parts(self.fused_experts, self.prepare_finalize)
        op, args = call_of(
            hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map,
            apply_router_weight_on_input, self.fused_experts.quant_config,
            getattr(self, "scale_ue8m0", False),  # in a fork, the host's constructor sets none
        )  # fmt: skip
        return op(*args)


class VllmMixtralMoE(SparseMoE):
    """vllm.model_executor.models.mixtral.MixtralMoE; see SparseMoE.

    Raises ValueError for dp_size over 1 and enable_eplb, which need vLLM's own expert parallelism.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        dp_size: int | None = None,
        prefix: str = "",
        enable_eplb: bool = False,
    ) -> None:
        super().__init__()
        if dp_size not in (None, 1) or enable_eplb:
            raise ValueError(f"{prefix}: dp_size={dp_size} and enable_eplb={enable_eplb} are not supported")
        self.hidden_size, self.top_k = hidden_size, top_k
        self.gate = VllmReplicatedLinear(
            hidden_size, num_experts, bias=False, params_dtype=params_dtype, prefix=f"{prefix}.gate"
        )
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, params_dtype, quant_config, tp_size, f"{prefix}.experts"
        )  # fmt: skip

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._forward(hidden_states)


_ROUTER = "vllm.model_executor.layers.fused_moe.router"
_GROUPED = f"{_ROUTER}.grouped_topk_router"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_ALIGN = f"{_FUSED_MOE}.moe_align_block_size:moe_align_block_size"
_MUL_SUM = f"{_FUSED_MOE}.moe_fused_mul_sum:moe_fused_mul_sum"
_MIXTRAL = "vllm.model_executor.models.mixtral:MixtralMoE"
_GROUPED_NOTE = "no router of vLLM calls it by itself: for forks and for our engine"
_KERNEL_NOTE = "vLLM's MoE kernels bind the function at import: for forks and for our engine"
_EXPERTS_NOTE = "vLLM calls it through objects that bind it at construction: for forks and for our engine"
_MIXTRAL_NOTE = (
    "in a live host the experts are the host's own layer, which keeps its weights in its kernel's layout"
)
_EXPERTS = (
    Target(
        "vllm",
        f"{_FUSED_MOE}.modular_kernel:FusedMoEKernelModularImpl",
        "VllmFusedMoEKernel",
        "experts",
        default=False,
    ),
    Target(
        "vllm", f"{_FUSED_MOE}.fused_moe:fused_experts", "vllm_fused_experts", "function", note=_EXPERTS_NOTE
    ),
)

TARGETS = {
    "topk_softmax": (
        Target(
            "vllm",
            f"{_ROUTER}.fused_topk_router:fused_topk",
            "vllm_fused_topk",
            "router",
            default=False,
        ),
    ),
    "grouped_topk": (
        Target("vllm", f"{_GROUPED}:GroupedTopk", "VllmGroupedTopk", "standalone", note=_GROUPED_NOTE),
        Target("vllm", f"{_GROUPED}:grouped_topk", "vllm_grouped_topk", "router", default=False),
        Target(
            "vllm",
            f"{_GROUPED}:fused_grouped_topk",
            "vllm_fused_grouped_topk",
            "function",
            note=_GROUPED_NOTE,
        ),
    ),
    "moe_align": (
        Target("vllm", _ALIGN, "vllm_moe_align_block_size_0_26", "function", "<0.32", note=_KERNEL_NOTE),
        Target("vllm", _ALIGN, "vllm_moe_align_block_size", "function", ">=0.32", note=_KERNEL_NOTE),
    ),
    "moe_sum": (
        Target("vllm", "vllm._custom_ops:moe_sum", "vllm_moe_sum", "function", note=_KERNEL_NOTE),
        Target("vllm", _MUL_SUM, "vllm_moe_fused_mul_sum_0_26", "function", "<0.32", note=_KERNEL_NOTE),
        Target("vllm", _MUL_SUM, "vllm_moe_fused_mul_sum", "function", ">=0.32", note=_KERNEL_NOTE),
    ),
    "fused_experts": _EXPERTS,
    "fused_experts_fp8": _EXPERTS,
    "sparse_moe": (Target("vllm", _MIXTRAL, "VllmMixtralMoE", "standalone", note=_MIXTRAL_NOTE),),
}
