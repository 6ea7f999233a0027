"""vLLM's classes and functions of routing: routers, the sort by expert, and the sum over experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.routing.arguments import check_tokens, refuse
from fastkernels.overrides.routing.grouped_topk import WeightsAndIds, grouped_topk
from fastkernels.overrides.routing.moe_align import Aligned, moe_align, padded_size
from fastkernels.overrides.routing.moe_sum import moe_sum
from fastkernels.overrides.routing.topk_softmax import topk_softmax


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
) -> WeightsAndIds:
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
) -> WeightsAndIds:
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
    ) -> WeightsAndIds:
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


_ROUTER = "vllm.model_executor.layers.fused_moe.router"
_GROUPED = f"{_ROUTER}.grouped_topk_router"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_ALIGN = f"{_FUSED_MOE}.moe_align_block_size:moe_align_block_size"
_MUL_SUM = f"{_FUSED_MOE}.moe_fused_mul_sum:moe_fused_mul_sum"
_GROUPED_NOTE = "no router of vLLM calls it by itself: for forks and for our engine"
_KERNEL_NOTE = "vLLM's MoE kernels bind the function at import: for forks and for our engine"

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
}
