"""Quantized weights of stacked experts: the parameters that each format registers, and the op that reads them.

The counterpart of linear/quantized.py, whose layouts these are with the experts as a first dimension. n experts are
on a rank, and inner is its part of their intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.overrides.kit.fp8 import FP8
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK
from fastkernels.overrides.linear.linear_int4 import UNIT
from fastkernels.overrides.linear.linear_nvfp4 import GROUP as NVFP4_GROUP
from fastkernels.overrides.linear.quantized import check_multiple
from fastkernels.overrides.moe.fused_experts_fp8 import fused_experts_fp8
from fastkernels.overrides.moe.fused_experts_int4 import fused_experts_int4
from fastkernels.overrides.moe.fused_experts_nvfp4 import fused_experts_nvfp4


class Fp8ExpertsMethod:
    """Weights in float8 e4m3, products by the op `fused_experts_fp8`; block and static: see Fp8LinearMethod.

    A scale per matrix is repeated for its rows. The static scales of all experts' inputs are one: the largest.
    """

    op = "fused_experts_fp8"

    def __init__(self, block: bool = False, static: bool = False) -> None:
        self.block, self.static = block, static

    def create_weights(self, layer: Any, n: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        layer.add("w13_weight", (n, 2 * inner, hidden), FP8, 0)
        layer.add("w2_weight", (n, hidden, inner), FP8, 1)
        if self.block:
            for columns in (hidden, inner):
                check_multiple(layer, BLOCK, columns, [], "block")
            shape = n, 2 * inner // BLOCK, hidden // BLOCK
            layer.add("w13_weight_scale", shape, torch.float32, 0)
            layer.add("w2_weight_scale", (n, -(-hidden // BLOCK), inner // BLOCK), torch.float32, 1)
        else:
            layer.add("w13_weight_scale", (n, 2 * inner), torch.float32, 0)
            layer.add("w2_weight_scale", (n, hidden), torch.float32, None)
        if self.static:
            for name in ("w13_input_scale", "w2_input_scale"):
                layer.add(name, (1,), torch.float32, None)
                layer.get_parameter(name).data.zero_()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: the op uses the tensors as they were loaded."""

    def arguments(
        self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[Any, ...]:
        """Return the op's arguments."""
        inputs = (layer.w13_input_scale, layer.w2_input_scale) if self.static else (None, None)
        return (
            x, layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale, weights, ids, *inputs,
            not (self.static or self.block), [BLOCK, BLOCK] if self.block else None, False, layer.expert_map,
        )  # fmt: skip

    def apply(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_experts_fp8(*self.arguments(layer, x, weights, ids))


class Int4ExpertsMethod:
    """Weights of 4 bits for the op `fused_experts_int4`; group, zeros and scale_dtype: see Int4LinearMethod."""

    op = "fused_experts_int4"

    def __init__(self, group: int, zeros: bool, scale_dtype: torch.dtype | None = None) -> None:
        self.group, self.zeros, self.scale_dtype = group, zeros, scale_dtype

    def create_weights(self, layer: Any, n: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        scale_dtype = dtype if dtype.itemsize > 2 else self.scale_dtype or dtype
        for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
            check_multiple(layer, UNIT, columns, [], "packing")
            if self.group > 0:
                check_multiple(layer, self.group, columns, [], "group")
            groups = columns // self.group if self.group > 0 else 1
            shared = 0 if name == "w13" else 1
            layer.add(f"{name}_weight", (n, rows, columns // 2), torch.uint8, shared)
            # One group of all columns: every rank has the scale of w2's rows.
            own = None if name == "w2" and self.group < 0 else shared
            layer.add(f"{name}_weight_scale", (n, rows, groups), scale_dtype, own)
            if self.zeros:
                layer.add(f"{name}_weight_zero", (n, rows, groups), torch.uint8, own)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: the tensors were packed while they were read."""

    def apply(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        zeros = (layer.w13_weight_zero, layer.w2_weight_zero) if self.zeros else (None, None)
        return fused_experts_int4(
            x, layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale, weights, ids, *zeros,
            layer.expert_map,
        )  # fmt: skip


class Nvfp4ExpertsMethod:
    """Weights in NVFP4 for the op `fused_experts_nvfp4`, with the factor of each matrix repeated for its rows."""

    op = "fused_experts_nvfp4"

    def create_weights(self, layer: Any, n: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
            check_multiple(layer, NVFP4_GROUP, columns, [], "group")
            shared = 0 if name == "w13" else 1
            layer.add(f"{name}_weight", (n, rows, columns // 2), torch.uint8, shared)
            layer.add(f"{name}_weight_scale", (n, rows, columns // NVFP4_GROUP), FP8, shared)
            layer.add(f"{name}_weight_factor", (n, rows), torch.float32, 0 if name == "w13" else None)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: the op uses the tensors as they were loaded."""

    def arguments(
        self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[Any, ...]:
        """Return the op's arguments."""
        return (
            x, layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale,
            layer.w13_weight_factor, layer.w2_weight_factor, weights, ids, layer.expert_map,
        )  # fmt: skip

    def apply(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_experts_nvfp4(*self.arguments(layer, x, weights, ids))
