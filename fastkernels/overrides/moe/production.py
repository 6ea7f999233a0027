"""Production's kernels for the ops of this family, called with the ops' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.core.baseline import (
    Baseline,
    Function,
    Preparation,
    aligned,
    dense,
    filled,
    first,
    half,
    inductor,
    same,
)
from fastkernels.overrides.kit.libraries import from_vllm, vllm_ops
from fastkernels.overrides.linear.linear_fp8_libraries import DEEP_GEMM
from fastkernels.overrides.moe.expert_libraries import (
    fused_experts_fp8_cutlass,
    fused_experts_fp8_deepgemm,
    fused_experts_fp8_vllm,
    supports_cutlass,
    supports_deepgemm,
    supports_vllm_fp8,
)

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


def _fused_experts() -> Function:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def experts(
        x: T, w1: T, w2: T, topk_weights: T, topk_ids: T, expert_map: T | None = None, on_input: bool = False
    ) -> T:
        if expert_map is None:
            return fused_experts(x, w1, w2, topk_weights, topk_ids, apply_router_weight_on_input=on_input)
        return fused_experts(
            x, w1, w2, topk_weights, topk_ids, apply_router_weight_on_input=on_input,
            global_num_experts=expert_map.numel(), expert_map=expert_map,
        )  # fmt: skip

    return experts


def _fused_experts_mxfp4() -> Function:
    """vLLM's experts on OpenAI's Triton kernels."""
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as kernels

    def experts(
        x: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T, w2_scale: T,
        expert_map: T | None = None, alpha: float = 1.702, limit: float = 7.0, *, prepared: Sequence[Any],
    ) -> T:  # fmt: skip
        (first_w, first_scale), (second_w, second_scale), *biases = prepared
        config = mxfp4_w4a16_moe_quant_config(first_scale, second_scale, *biases)
        routing = kernels.make_routing_data(topk_ids, topk_weights, w1.shape[0])
        return kernels.triton_kernel_fused_experts(
            torch.empty_like(x), x, first_w, second_w, *routing, topk_ids.shape[1], quant_config=config,
            swiglu_alpha=alpha, swiglu_limit=limit,
        )  # fmt: skip

    return experts


def _swizzled(weight: int, scale: int) -> Preparation:
    """The weights of one layer of experts with their scales, as vLLM swizzles them at load."""

    def swizzle(*args: Any) -> tuple[Any, Any]:
        from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as kernels
        from vllm.model_executor.layers.quantization.utils import mxfp4_utils

        if hasattr(kernels, "triton_kernels_version") and kernels.triton_kernels_version == "3.8":
            from triton_kernels.matmul import FlexCtx, PrecisionConfig
        else:
            from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
        values, flex, scales = mxfp4_utils._swizzle_mxfp4(args[weight], args[scale])
        # vLLM 0.26, with triton_kernels before 3.8, has no such function
        of_scales = getattr(mxfp4_utils, "mx_scale_kwargs", lambda s: {"weight_scale": s})
        return values, PrecisionConfig(**of_scales(scales), flex_ctx=FlexCtx(rhs_data=flex))

    return Preparation((weight, scale), swizzle)


_MXFP4 = (
    _swizzled(1, 7), _swizzled(2, 8), *(Preparation((i,), lambda *args, i=i: args[i].float()) for i in (3, 4)),
)  # fmt: skip


def _no_mxfp4(
    x: T, w1: T, w2: T, w1_bias: T, w2_bias: T, topk_weights: T, topk_ids: T, w1_scale: T | None = None,
    w2_scale: T | None = None, expert_map: T | None = None, *_: Any,
) -> str | None:  # fmt: skip
    if w1_scale is None or x.dtype != torch.bfloat16 or expert_map is not None:
        return "vLLM calls these kernels for MXFP4 weights and bfloat16, with all experts on the rank"
    return first(dense(x, w1, w2), filled(topk_ids))


def _no_experts(x: T, w1: T, w2: T, *_: Any) -> str | None:
    return first(same(x, w1, w2), dense(x, w1, w2), filled(x), aligned(x), aligned(w2))


def _fused_experts_gelu() -> Function:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def experts(x: T, w1: T, w2: T, topk_weights: T, topk_ids: T, expert_map: T | None = None) -> T:
        elsewhere = (
            {} if expert_map is None else {"global_num_experts": expert_map.numel(), "expert_map": expert_map}
        )
        return fused_experts(
            x, w1, w2, topk_weights, topk_ids, activation=MoEActivation.GELU_TANH, **elsewhere
        )

    return experts


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
    "fused_experts": (from_vllm(_fused_experts, _no_experts),),
    "fused_experts_fp8": (
        from_vllm(lambda: fused_experts_fp8_vllm, supports_vllm_fp8),
        Baseline("cutlass", "host", lambda: fused_experts_fp8_cutlass, ("vllm",), refuses=supports_cutlass),
        Baseline(
            "deepgemm",
            "host",
            lambda: fused_experts_fp8_deepgemm,
            ("vllm", DEEP_GEMM),
            refuses=supports_deepgemm,
        ),
    ),
    "fused_experts_gelu": (from_vllm(_fused_experts_gelu, _no_experts),),
    "fused_experts_swigluoai": (
        Baseline(
            "vllm",
            "host",
            _fused_experts_mxfp4,
            ("vllm", "triton_kernels"),
            refuses=_no_mxfp4,
            prepares=_MXFP4,
        ),
    ),
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
