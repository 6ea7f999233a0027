"""SGLang's functions of routing: routers, the sort by expert, and the sum over experts."""

from __future__ import annotations

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.routing.arguments import check_tokens, refuse
from fastkernels.overrides.routing.grouped_topk import WeightsAndIds, grouped_topk
from fastkernels.overrides.routing.moe_align import Aligned, moe_align, padded_size
from fastkernels.overrides.routing.moe_sum import moe_sum
from fastkernels.overrides.routing.topk_softmax import topk_softmax


def sglang_fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
    num_fused_shared_experts: int = 0,
    packed_out: torch.Tensor | None = None,
    num_token_non_padded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sglang.srt.layers.moe.topk.fused_topk, for softmax scores: (weights [T, topk], ids [T, topk] int32).

    Softmax routing ignores the correction bias and the scaling factor, as in SGLang. Raises ValueError for another
    scoring_func and for packed_out, the output of a LoRA kernel.
    """
    check_tokens(hidden_states, gating_output)
    other = None if scoring_func == "softmax" else scoring_func
    refuse("fused_topk", scoring_func=other, packed_out=packed_out)
    weights, ids, _ = topk_softmax(gating_output, topk, renormalize)
    return weights, ids


def _grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    bias: torch.Tensor | None,
    topk: int,
    renormalize: bool,
    groups: int | None,
    topk_group: int | None,
    shared: int,
    factor: float | None,
    scoring_func: str,
) -> WeightsAndIds:
    check_tokens(hidden_states, gating_output)
    refuse("grouped_topk", num_fused_shared_experts=shared or None)
    return grouped_topk(
        gating_output, topk, renormalize, groups or 1, topk_group or 1, scoring_func, bias,
        1.0 if factor is None else factor,
    )  # fmt: skip


def sglang_grouped_topk_gpu(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
    scoring_func: str = "softmax",
) -> WeightsAndIds:
    """sglang.srt.layers.moe.topk.grouped_topk_gpu: (weights [T, topk], ids [T, topk] int32).

    routed_scaling_factor needs apply_routed_scaling_factor_on_output. Before 0.5.23 SGLang also requires renormalize;
    ours follows 0.5.23 for all versions. Raises ValueError for num_fused_shared_experts.
    """
    factor = routed_scaling_factor if apply_routed_scaling_factor_on_output else None
    groups = (num_expert_group, topk_group, num_fused_shared_experts, factor, scoring_func)
    return _grouped_topk(hidden_states, gating_output, None, topk, renormalize, *groups)


def sglang_biased_grouped_topk_gpu(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
) -> WeightsAndIds:
    """sglang.srt.layers.moe.topk.biased_grouped_topk_gpu, for sigmoid scores; see sglang_grouped_topk_gpu."""
    factor = routed_scaling_factor if apply_routed_scaling_factor_on_output else None
    groups = (num_expert_group, topk_group, num_fused_shared_experts, factor, "sigmoid")
    return _grouped_topk(hidden_states, gating_output, correction_bias, topk, renormalize, *groups)


def sglang_moe_align_block_size_0_5_17(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, ignore_invalid_expert: bool = False
) -> Aligned:
    """sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size.moe_align_block_size before 0.5.23.

    Pairs with the id -1 (experts on other ranks) come first, in blocks of expert -1, or are dropped
    (ignore_invalid_expert).
    """
    capacity = padded_size(topk_ids.numel(), block_size, num_experts + 1)
    return moe_align(topk_ids, block_size, num_experts, capacity, None, not ignore_invalid_expert)


def sglang_moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    ignore_invalid_expert: bool = False,
    *,
    return_inactive_prefix_count: bool = False,
    pad_expert_ids: bool = False,
) -> Aligned:
    """sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size.moe_align_block_size since 0.5.23.

    Raises ValueError for return_inactive_prefix_count and pad_expert_ids, which other kernels of SGLang use.
    """
    refuse(
        "moe_align_block_size", return_inactive_prefix_count=return_inactive_prefix_count, pad_expert_ids=pad_expert_ids
    )  # fmt: skip
    capacity = -(-padded_size(topk_ids.numel(), block_size, num_experts + 1) // 4) * 4
    return moe_align(topk_ids, block_size, num_experts, capacity, None, not ignore_invalid_expert)


def sglang_moe_sum_reduce_triton(
    input: torch.Tensor, output: torch.Tensor, routed_scaling_factor: float
) -> None:
    """sglang.kernels.ops.moe.fused_moe_triton_kernels.moe_sum_reduce_triton: sum input [T, K, H] to output [T, H]."""
    moe_sum(input, output, None, None, None, routed_scaling_factor)


_MOE = "sglang.srt.layers.moe"
_ALIGN = f"{_MOE}.moe_runner.triton_utils.moe_align_block_size:moe_align_block_size"
_SUM = "sglang.kernels.ops.moe.fused_moe_triton_kernels:moe_sum_reduce_triton"
_ROUTING_NOTE = "SGLang's routers bind the function at import: for forks and for our engine"
_KERNEL_NOTE = "SGLang's MoE kernels bind the function at import: for forks and for our engine"


def _router(name: str) -> Target:
    return Target("sglang", f"{_MOE}.topk:{name}", f"sglang_{name}", "function", note=_ROUTING_NOTE)


TARGETS = {
    "topk_softmax": (_router("fused_topk"),),
    "grouped_topk": (_router("grouped_topk_gpu"), _router("biased_grouped_topk_gpu")),
    "moe_align": (
        Target(
            "sglang", _ALIGN, "sglang_moe_align_block_size_0_5_17", "function", "<0.5.23", note=_KERNEL_NOTE
        ),
        Target("sglang", _ALIGN, "sglang_moe_align_block_size", "function", ">=0.5.23", note=_KERNEL_NOTE),
    ),
    "moe_sum": (Target("sglang", _SUM, "sglang_moe_sum_reduce_triton", "function", note=_KERNEL_NOTE),),
}
