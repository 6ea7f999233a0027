"""Baselines of experts: the kernels that production runs, called with the ops' arguments."""

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
    same,
)
from fastkernels.overrides.kit.libraries import from_vllm
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
}
