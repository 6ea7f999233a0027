"""Baselines of routing: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.baseline import (
    Baseline,
    Function,
    aligned,
    dense,
    filled,
    first,
    half,
    inductor,
    same,
)
from fastkernels.overrides.kit.libraries import from_vllm, vllm_ops

T = torch.Tensor


def _topk_softmax() -> Function:
    vllm_ops()
    topk_softmax = torch.ops._moe_C.topk_softmax

    def fused_topk(gating_output: T, topk: int, renormalize: bool = False) -> tuple[T, T, T]:
        shape, device = (gating_output.shape[0], topk), gating_output.device
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        ids, indices = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        topk_softmax(weights, ids, indices, gating_output, renormalize, None)
        return weights, ids, indices

    return fused_topk


def _moe_align() -> Function:
    vllm_ops()
    align = torch.ops._moe_C.moe_align_block_size

    def moe_align(
        topk_ids: T, block_size: int, num_experts: int, capacity: int, expert_map: T | None = None, *_: Any
    ) -> tuple[T, T, T]:
        sizes = (capacity, -(-capacity // block_size), 1)
        found = tuple(torch.empty(n, dtype=torch.int32, device=topk_ids.device) for n in sizes)
        align(topk_ids, num_experts, block_size, *found, expert_map)
        return found[0], found[1], found[2]

    return moe_align


def _no_align(
    topk_ids: T, block_size: int, num_experts: int, capacity: int, expert_map: T | None = None,
    invalid_first: bool = False,
) -> str | None:  # fmt: skip
    if invalid_first:
        return "vLLM's kernel cannot put invalid ids first"
    return filled(topk_ids) or (
        "vLLM's kernel supports no negative ids" if bool((topk_ids < 0).any()) else None
    )


def _moe_sum() -> Function:
    vllm_ops()
    total = torch.ops._moe_C.moe_sum

    def moe_sum(
        input: T,
        output: T,
        topk_weights: None = None,
        topk_ids: T | None = None,
        expert_map: T | None = None,
        *_: Any,
    ) -> None:
        total(input, output, topk_ids, expert_map)

    return moe_sum


def _no_moe_sum(
    input: T, output: T, topk_weights: T | None = None, topk_ids: T | None = None, expert_map: T | None = None,
    factor: float = 1.0,
) -> str | None:  # fmt: skip
    if topk_weights is not None or factor != 1.0:
        return "vLLM applies the weights in its second product"
    return first(same(input, output), dense(input, output), filled(input))


def _weighted_sum() -> Function:
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    def moe_sum(
        input: T, output: T, topk_weights: T, topk_ids: T | None = None, expert_map: T | None = None, *_: Any
    ) -> None:
        moe_fused_mul_sum(input, topk_weights, output, topk_ids, expert_map)

    return moe_sum


def _no_weighted_sum(
    input: T, output: T, topk_weights: T | None = None, topk_ids: T | None = None, expert_map: T | None = None,
    factor: float = 1.0,
) -> str | None:  # fmt: skip
    if topk_weights is None or factor != 1.0:
        return "vLLM's kernel multiplies only by the weights"
    return first(same(input, output), dense(input, output), filled(input))


def _sgl_moe_sum() -> Function:
    from sgl_kernel import moe_sum_reduce

    def moe_sum(
        input: T, output: T, w: None = None, ids: None = None, m: None = None, factor: float = 1.0
    ) -> None:
        moe_sum_reduce(input, output, factor)

    return moe_sum


def _no_sgl_moe_sum(
    input: T, output: T, topk_weights: T | None = None, topk_ids: T | None = None, *_: Any
) -> str | None:
    if topk_weights is not None or topk_ids is not None:
        return "SGLang's kernel sums all parts without weights"
    return first(half(input), same(input, output), dense(input, output), filled(input), aligned(input))


def _grouped_topk() -> Function:
    vllm_ops()
    route = torch.ops._moe_C.grouped_topk

    def grouped_topk(
        gating: T, topk: int, renormalize: bool, groups: int = 1, topk_group: int = 1, scoring: str = "softmax",
        bias: T | None = None, factor: float = 1.0,
    ) -> tuple[T, T]:  # fmt: skip
        sigmoid = scoring == "sigmoid"
        scores = gating if sigmoid else torch.softmax(gating, dim=-1)  # in PyTorch, as in vLLM
        weights, ids = route(scores, groups, topk_group, topk, renormalize, factor, bias, int(sigmoid))
        return weights, ids

    return grouped_topk


def _no_grouped(
    gating: T, topk: int, renormalize: bool, groups: int = 1, topk_group: int = 1, scoring: str = "softmax",
    bias: T | None = None, factor: float = 1.0,
) -> str | None:  # fmt: skip
    if bias is None:
        return "vLLM's kernel needs a bias to rank groups"
    if groups > 32 or topk > 32:
        return f"vLLM's kernel supports at most 32 groups and 32 choices, got {groups} and {topk}"
    return first(dense(gating), filled(gating), same(gating, bias) if scoring == "softmax" else None)


def _sglang_gate() -> Function:
    from sglang.jit_kernel.moe_fused_gate import moe_fused_gate

    def grouped_topk(
        gating: T, topk: int, renormalize: bool, groups: int = 1, topk_group: int = 1, scoring: str = "sigmoid",
        bias: T | None = None, factor: float = 1.0,
    ) -> tuple[T, T]:  # fmt: skip
        weights, ids = moe_fused_gate(
            gating, bias, topk, scoring_func=scoring, renormalize=renormalize, routed_scaling_factor=factor,
            apply_routed_scaling_factor_on_output=True, num_expert_group=groups, topk_group=topk_group,
        )  # fmt: skip
        return weights, ids

    return grouped_topk


def _no_sglang_gate(
    gating: T, topk: int, renormalize: bool, groups: int = 1, topk_group: int = 1, scoring: str = "softmax",
    bias: T | None = None, factor: float = 1.0,
) -> str | None:  # fmt: skip
    if bias is None or scoring != "sigmoid" or not gating.dtype == bias.dtype == torch.float32:
        return "SGLang's kernel needs sigmoid scores, a bias and float32"
    return first(dense(gating), filled(gating))


_ORDER = "vLLM fixes neither the order of an expert's tokens nor the values behind the last block"


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "grouped_topk": (
        from_vllm(_grouped_topk, _no_grouped),
        Baseline("sglang", "host", _sglang_gate, ("sglang.jit_kernel",), refuses=_no_sglang_gate),
        inductor("grouped_topk"),
    ),
    "moe_align": (from_vllm(_moe_align, _no_align, differs=_ORDER, unchecked=(0, 1)),),
    "moe_sum": (
        from_vllm(_moe_sum, _no_moe_sum),
        Baseline("vllm-weighted", "host", _weighted_sum, ("vllm",), refuses=_no_weighted_sum),
        Baseline("sgl_kernel", "host", _sgl_moe_sum, ("sgl_kernel",), refuses=_no_sgl_moe_sum),
        inductor("moe_sum"),
    ),
    "topk_softmax": (from_vllm(_topk_softmax, lambda gating, *_: first(dense(gating), filled(gating))),),
}
