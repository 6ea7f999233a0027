"""vLLM's launch of the grouped matrix product, through which its layers and functions with Triton experts go."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.export.plain.experts import check, check_blocks, multiply, multiply_fp8
from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.routing.arguments import refuse


def grouped_product(
    A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, A_scale: torch.Tensor | None, B_scale: torch.Tensor | None,
    topk_weights: torch.Tensor | None, sorted_token_ids: torch.Tensor | None, expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor, mul_routed_weight: bool, top_k: int, config: dict[str, Any],
    compute_type: Any, use_fp8_w8a8: bool, use_int8_w8a8: bool, use_int8_w8a16: bool, use_int4_w4a16: bool,
    per_channel_quant: bool, block_shape: list[int] | None = None, B_bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """A: [T, K]; B: [E, N, K]; C: [T, top_k, N], the result."""
    refuse("invoke_fused_moe_triton_kernel", B_scale=B_scale, B_bias=B_bias)
    check(A, B, C, config["BLOCK_SIZE_M"], A.dtype if A.itemsize == 2 else None)
    weights = topk_weights if mul_routed_weight else None
    pairs, experts, total = sorted_token_ids, expert_ids, num_tokens_post_padded
    multiply(A, B, C, weights, pairs, experts, total, len(A) * top_k, top_k, config["BLOCK_SIZE_M"])


def grouped_product_fp8(
    A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, A_scale: torch.Tensor | None, B_scale: torch.Tensor | None,
    topk_weights: torch.Tensor | None, sorted_token_ids: torch.Tensor | None, expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor, mul_routed_weight: bool, top_k: int, config: dict[str, Any],
    compute_type: Any, use_fp8_w8a8: bool, use_int8_w8a8: bool, use_int8_w8a16: bool, use_int4_w4a16: bool,
    per_channel_quant: bool, block_shape: list[int] | None = None, B_bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """A: [T, K] and B: [E, N, K] in float8 e4m3 with their scales; C: [T, top_k, N], the result."""
    refuse("invoke_fused_moe_triton_kernel", B_bias=B_bias)
    if not use_fp8_w8a8 or A.dtype != FP8 or A_scale is None or B_scale is None:
        raise ValueError("not in float8")
    check(A, B, C, config["BLOCK_SIZE_M"], FP8)
    weights = topk_weights if mul_routed_weight else None
    pairs, experts, total = sorted_token_ids, expert_ids, num_tokens_post_padded
    multiply_fp8(
        A, B, C, A_scale, B_scale, check_blocks(block_shape), weights, pairs, experts, total, len(A) * top_k, top_k,
        config["BLOCK_SIZE_M"],
    )  # fmt: skip
