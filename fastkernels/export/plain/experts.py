"""The grouped matrix product of a fork: the host sorts, quantizes, activates and adds; our kernel multiplies."""

from __future__ import annotations

import torch
import triton
from triton import cdiv

from fastkernels.overrides.moe.grouped_gemm import grouped_gemm_kernel

# block_n, block_k, group_m, warps, stages for the block_m with which the host sorts the pairs (Hopper)
TILES = {16: (64, 128, 1, 4, 4), 32: (128, 128, 16, 4, 3), 64: (128, 64, 8, 4, 3), 128: (256, 64, 8, 8, 3)}
FP8_TILES = {
    16: (64, 128, 1, 4, 4),
    32: (64, 128, 1, 4, 5),
    64: (128, 128, 16, 4, 4),
    128: (128, 128, 16, 8, 4),
}
CHIPS = ((9, 0), (10, 0), (10, 3))  # with the shared memory for these tiles


def check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, block_m: int, dtype: torch.dtype | None) -> None:
    """Raise ValueError for products that the kernel does not compute; dtype: of b."""
    fast = triton.knobs.runtime.interpret or (
        a.is_cuda and torch.cuda.get_device_capability(a.device) in CHIPS
    )
    plain = a.stride(-1) == b.stride(-1) == c.stride(-1) == 1 and c.stride(-2) == b.shape[1]
    if not fast or not plain or b.dtype != dtype or block_m not in TILES:
        raise ValueError("another chip, layout, dtype or tile")


def multiply(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, weights: torch.Tensor | None, pairs: torch.Tensor | None,
    experts: torch.Tensor, total: torch.Tensor, count: int, topk: int, block_m: int,
) -> None:  # fmt: skip
    """Write to c [pairs, N] the rows b[expert] @ a[pair / topk] of `count` pairs, scaled by weights or None."""
    block_n, block_k, group_m, warps, stages = TILES[block_m]
    n, blocks = b.shape[1], count if pairs is None else min(count, cdiv(pairs.numel(), block_m))
    grouped_gemm_kernel[blocks * cdiv(n, block_n),](
        a, b, c, weights, pairs, experts, total, a, b, n, b.shape[0], count, blocks, a.stride(0), b.stride(0),
        b.stride(1), 0, 0, 0, 0, 0, K=a.shape[1], TOPK=topk, HAS_SCALE=weights is not None, SORTED=pairs is not None,
        FP8=False, BLOCKS=False, UPCAST=False, SWAP=False, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        GROUP_M=group_m, OVERLAP=False, ZEROS=True, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def multiply_fp8(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, of_blocks: bool,
    weights: torch.Tensor | None, pairs: torch.Tensor | None, experts: torch.Tensor, total: torch.Tensor, count: int,
    topk: int, block_m: int,
) -> None:  # fmt: skip
    """Multiply float8 matrices with scales of 128 x 128 weights (of_blocks), of rows, or of experts; see multiply."""
    block_n, block_k, group_m, warps, stages = FP8_TILES[block_m]
    n, blocks = b.shape[1], count if pairs is None else min(count, cdiv(pairs.numel(), block_m))
    a_row, a_block = a_scale.stride() if a_scale.dim() == 2 and a_scale.numel() > 1 else (0, 0)
    b_row = b_scale.stride(1) if b_scale.dim() > 1 and b_scale.shape[1] > 1 else 0
    grouped_gemm_kernel[blocks * cdiv(n, block_n),](
        a, b, c, weights, pairs, experts, total, a_scale, b_scale, n, b.shape[0], count, blocks, a.stride(0),
        b.stride(0), b.stride(1), a_row, a_block, b_scale.stride(0), b_row, b_scale.stride(-1), K=a.shape[1], TOPK=topk,
        HAS_SCALE=weights is not None, SORTED=pairs is not None, FP8=True, BLOCKS=of_blocks, UPCAST=not a.is_cuda,
        SWAP=block_m <= 32, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m, OVERLAP=False,
        ZEROS=True, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def check_blocks(block_shape: list[int] | None) -> bool:
    """Return whether scales are of blocks. Raises ValueError for blocks of another size."""
    if block_shape is not None and list(block_shape) != [128, 128]:
        raise ValueError(f"block_shape {block_shape} is not [128, 128]")
    return block_shape is not None
