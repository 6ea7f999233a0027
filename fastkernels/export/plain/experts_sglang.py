"""SGLang's launch of the grouped matrix product, through which its layers and functions with Triton experts go."""

from __future__ import annotations

import sys
from typing import Any

import torch

from fastkernels.export.plain.experts import check, check_blocks, multiply, multiply_fp8
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.routing.arguments import refuse


def quantization() -> Any:
    """Return the host's module of the launch, which has its quantization."""
    return sys.modules["sglang.kernels.ops.moe.fused_moe_triton_kernels"]


# Options that change nothing here: rows of experts on other ranks are always zeros.
IGNORED = {"filter_expert", "no_combine", "router_topk", "a_output_slices"}


def check_options(options: dict[str, Any]) -> None:
    if any(options[name] for name in options.keys() - IGNORED):
        raise ValueError(f"{options} has an option that only SGLang's kernel has")


def grouped_product(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, C: torch.Tensor, A_scale: torch.Tensor | None,
    B_scale: torch.Tensor | None, B_zp: torch.Tensor | None, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor,
    mul_routed_weight: bool, top_k: int, config: dict[str, Any], compute_type: Any, use_fp8_w8a8: bool,
    use_int8_w8a8: bool, use_int8_w8a16: bool, use_int4_w4a16: bool, per_channel_quant: bool,
    block_shape: list[int] | None = None, **options: Any,
) -> None:  # fmt: skip
    """A: [T, K]; B: [E, N, K]; C: [T, top_k, N], the result."""
    refuse("invoke_fused_moe_kernel", bias=bias, B_scale=B_scale)
    check_options(options)
    check(A, B, C, config["BLOCK_SIZE_M"], A.dtype if A.itemsize == 2 else None)
    weights = topk_weights if mul_routed_weight else None
    pairs, experts, total = sorted_token_ids, expert_ids, num_tokens_post_padded
    multiply(A, B, C, weights, pairs, experts, total, topk_ids.numel(), top_k, config["BLOCK_SIZE_M"])


def grouped_product_fp8(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, C: torch.Tensor, A_scale: torch.Tensor | None,
    B_scale: torch.Tensor | None, B_zp: torch.Tensor | None, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, num_tokens_post_padded: torch.Tensor,
    mul_routed_weight: bool, top_k: int, config: dict[str, Any], compute_type: Any, use_fp8_w8a8: bool,
    use_int8_w8a8: bool, use_int8_w8a16: bool, use_int4_w4a16: bool, per_channel_quant: bool,
    block_shape: list[int] | None = None, **options: Any,
) -> None:  # fmt: skip
    """A: [T, K], which is quantized here; B: [E, N, K] in float8 e4m3 with its scales; C: [T, top_k, N], the result."""
    refuse("invoke_fused_moe_kernel", bias=bias)
    check_options(options)
    if not use_fp8_w8a8 or B_scale is None:
        raise ValueError("not in float8")
    of_blocks, block_m = check_blocks(block_shape), config["BLOCK_SIZE_M"]
    check(A, B, C, block_m, FP8)
    if not of_blocks:
        a, a_scale = quantization().scaled_fp8_quant(A, A_scale, use_per_token_if_dynamic=per_channel_quant)
    elif A.dtype != FP8:
        a, a_scale = quantization().sglang_per_token_group_quant_fp8(A, 128)
    else:
        a, a_scale = A, A_scale
    weights = topk_weights if mul_routed_weight else None
    pairs, experts, total = sorted_token_ids, expert_ids, num_tokens_post_padded
    multiply_fp8(
        a, B, C, a_scale, B_scale, of_blocks, weights, pairs, experts, total, topk_ids.numel(), top_k, block_m
    )  # fmt: skip
