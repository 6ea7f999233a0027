"""Where the scales of float8 experts lie, what their activations' scales are, and both in the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastkernels.overrides.kit.fp8 import FP8, GROUP_EPS, MIN_ABSMAX, quantize_rows
from fastkernels.overrides.linear.linear_fp8_scales import BLOCK, ROW, TENSOR, blocks, expanded
from fastkernels.overrides.moe.grouped_gemm import Scales

GIVEN, TOKEN, FOUND = 0, 1, 2  # scales of activations; BLOCK: of groups


class Kind(NamedTuple):
    """weights     TENSOR: a scale an expert, ROW: a row, BLOCK: 128 x 128 numbers
    activations GIVEN: one that is given, TOKEN: one a token, FOUND: one for all that is found, BLOCK: 128 columns
    """

    weights: int
    activations: int

    @property
    def group_size(self) -> int:
        """As quantize_fp8 has it."""
        return {TOKEN: -1, BLOCK: BLOCK}.get(self.activations, 0)

    @property
    def min_absmax(self) -> float:
        return GROUP_EPS if self.activations == BLOCK else MIN_ABSMAX


def kind_of(
    w1: torch.Tensor, w1_scale: torch.Tensor, a1_scale: torch.Tensor | None, per_token: bool,
    block_shape: list[int] | None,
) -> Kind:  # fmt: skip
    """Of a call whose arguments were checked."""
    if block_shape is not None:
        return Kind(BLOCK, BLOCK)
    weights = TENSOR if w1_scale.numel() == w1.shape[0] else ROW
    return Kind(weights, TOKEN if per_token else FOUND if a1_scale is None else GIVEN)


def check(
    w1: torch.Tensor, w2: torch.Tensor, w1_scale: torch.Tensor, w2_scale: torch.Tensor, a1_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None, per_token: bool, block_shape: list[int] | None, ue8m0: bool,
) -> Kind:  # fmt: skip
    """Raises ValueError for scales that do not fit the weights or each other."""
    if block_shape is not None and (list(block_shape) != [BLOCK, BLOCK] or per_token):
        raise ValueError(
            f"fused_experts_fp8: block_shape {list(block_shape)} and per_act_token_quant {per_token}: blocks are"
            f" {BLOCK} x {BLOCK}, and activations then have a scale for each {BLOCK} columns"
        )
    if ue8m0 and block_shape is None:
        raise ValueError("fused_experts_fp8: scale_ue8m0 is for scales of blocks, and block_shape is None")
    found = []
    for name, w, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale)):
        e, n, k = w.shape
        if block_shape is not None and k % BLOCK:
            raise ValueError(
                f"fused_experts_fp8: {name} has {k} columns, not a multiple of {BLOCK}: groups of activations"
            )
        shapes: dict[int, list[tuple[int, ...]]] = {BLOCK: [(e, blocks(n), blocks(k))]}
        if block_shape is None:
            shapes = {TENSOR: [(e,), (e, 1), (e, 1, 1)], ROW: [(e, n), (e, n, 1)]}
        kinds = [kind for kind, several in shapes.items() if tuple(scale.shape) in several]
        if not kinds:
            said = " or ".join(str(shape) for several in shapes.values() for shape in several)
            raise ValueError(f"fused_experts_fp8: {name}_scale {tuple(scale.shape)} must be {said}")
        found.append(kinds)
    given = [s for s in (a1_scale, a2_scale) if s is not None]
    if not set(found[0]) & set(found[1]):
        raise ValueError(
            f"fused_experts_fp8: w1_scale {tuple(w1_scale.shape)} and w2_scale {tuple(w2_scale.shape)} must both be of"
            " experts or both of rows"
        )
    if len(given) == 1 or any(s.numel() != 1 for s in given) or (given and (per_token or block_shape)):
        raise ValueError(
            "fused_experts_fp8: a1_scale and a2_scale must both be one value, and without per_act_token_quant and"
            " block_shape, or both None"
        )
    return kind_of(w1, w1_scale, a1_scale, per_token, block_shape)


def scales(kind: Kind, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Scales:
    """For the grouped product of activations, whose scales are a_scale ([1] or [rows, columns]), and an expert's w."""
    a_row, a_block = (0, 0) if a_scale.dim() == 1 else a_scale.stride()
    if kind.weights == BLOCK:
        return Scales(BLOCK, a_scale, a_row, a_block, w_scale, *w_scale.stride())
    b_row = w_scale.stride(1) if kind.weights == ROW and w.shape[1] > 1 else 0
    return Scales(ROW, a_scale, a_row, 0, w_scale, w_scale.stride(0), b_row, 0)


def dequantized(w: torch.Tensor, scale: torch.Tensor, kind: Kind) -> torch.Tensor:
    """One expert's w [N, K], in the dtype of its scale."""
    return w.to(scale.dtype) * expanded(scale, w.shape[0], w.shape[1], kind.weights, BLOCK)


def rounded(y: torch.Tensor, scale: torch.Tensor | None, kind: Kind, ue8m0: bool) -> torch.Tensor:
    """y: [rows, N]. What its float8 numbers stand for, in at least float32; in float64 but for that rounding."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    if not wide.numel():
        return wide
    q, s = quantize_rows(wide, scale, kind.group_size, None, kind.min_absmax, ue8m0)
    groups = s.shape[-1] if s.dim() == y.dim() else 1
    return (q.to(FP8).to(wide.dtype).unflatten(-1, (groups, -1)) * s.unsqueeze(-1)).flatten(-2)
