"""Quantized weights of parallel linear layers: the parameters that each format registers, and the product.

A method holds the weight as [N, ...] with rows as in an unquantized layer, so that the layers' loaders share the rows
and columns over ranks. Checkpoints in other layouts are converted tensor by tensor while they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.kit.fp8 import FP8, GROUP_EPS, MIN_ABSMAX
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, ROW, expanded
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.linear_fp8 import linear_fp8
from fastkernels.overrides.linear.linear_int4 import (
    UNIT,
    dequantize_int4,
    linear_int4,
    pack_int4,
    tile_int4,
    unpack_int4,
    untile_int4,
)
from fastkernels.overrides.linear.linear_nvfp4 import GROUP as NVFP4_GROUP
from fastkernels.overrides.linear.linear_nvfp4 import dequantized, from_checkpoint, linear_nvfp4
from fastkernels.overrides.linear.linear_ternary import UNIT as TERNARY_UNIT
from fastkernels.overrides.linear.linear_ternary import linear_ternary, unpack_ternary
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8


def register(layer: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, **attrs: Any) -> None:
    """Register an uninitialized parameter with the attributes that the layer's weight_loader reads.

    output_dim, input_dim  dimension that is shared over ranks by rows or columns of the weight; None: each has all
    row_unit               rows of the weight for each row of this parameter
    per_matrix             a checkpoint may have one value for a whole matrix
    """
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    for key, value in attrs.items():
        setattr(parameter, key, value)
    layer.register_parameter(name, parameter)


class Fp8LinearMethod:
    """Weight [N, K] in float8 e4m3, x quantized for each call, product by the op `linear_fp8`.

    block   True: weight_scale [N / 128, K / 128], and x in groups of 128 columns. False: weight_scale [N], into which a
            scale per tensor is repeated, and x per token
    static  x has the checkpoint's input_scale [1]; the largest of the matrices that are packed into one weight
    """

    def __init__(self, block: bool = False, static: bool = False) -> None:
        self.block, self.static = block, static

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        n, k = sum(output_partition_sizes), input_size_per_partition
        register(layer, "weight", (n, k), FP8, input_dim=1, output_dim=0, **extra_weight_attrs)
        if self.block:
            check_multiple(layer, BLOCK, k, output_partition_sizes, "block")
            register(
                layer, "weight_scale", (-(-n // BLOCK), k // BLOCK), torch.float32, input_dim=1, output_dim=0,
                row_unit=BLOCK, **extra_weight_attrs,
            )  # fmt: skip
        else:
            register(
                layer,
                "weight_scale",
                (n,),
                torch.float32,
                output_dim=0,
                per_matrix=True,
                **extra_weight_attrs,
            )
        if self.static:
            register(layer, "input_scale", (1,), torch.float32, weight_loader=_load_largest)
            layer.input_scale.data.zero_()  # type: ignore[union-attr, operator]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: the op uses the tensors as they were loaded."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        n, k = layer.weight.shape
        kind = BLOCK if self.block else ROW
        return layer.weight.float() * expanded(layer.weight_scale, n, k, kind, BLOCK)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.static:
            q, scale = quantize_fp8(x, layer.input_scale)
        elif self.block:  # the layout of the scales is the one that DeepGEMM reads
            flat = x.dim() == 2
            q, scale = quantize_fp8(x, None, BLOCK, None, GROUP_EPS, flat, flat)
        else:
            q, scale = quantize_fp8(x, None, -1, None, MIN_ABSMAX)
        return linear_fp8(q, layer.weight, scale, layer.weight_scale, bias, x.dtype)


def _load_largest(parameter: nn.Parameter, loaded: torch.Tensor, *shard: Any) -> None:
    if loaded.numel() != 1:
        raise ValueError("expected one value")
    if not loaded.is_meta:
        parameter.data.copy_(torch.maximum(parameter.data, loaded.to(parameter).reshape(1)))


class Int4LinearMethod:
    """Weight of 4 bits, packed as in the op `linear_int4`, which multiplies x as it is; after loading it is in tiles.

    group        columns that share a scale, -1: all
    zeros        each group has a zero point
    scale_dtype  of the scales in a model of 16 bits; None: the model's
    act_order    the columns of a group may be anywhere: g_idx [K] has the group of each. Columns are sorted by group
                 after loading, and x's with each call

    Raises ValueError for act_order if ranks share the columns: a rank's columns belong to all groups.
    """

    per_byte = 2

    def __init__(
        self, group: int, zeros: bool, scale_dtype: torch.dtype | None = None, act_order: bool = False
    ) -> None:
        self.group, self.zeros, self.scale_dtype = group, zeros, scale_dtype
        self.act_order = act_order and group > 0

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        n, k = sum(output_partition_sizes), input_size_per_partition
        check_multiple(layer, UNIT, k, [], "packing")
        groups, input_dim = 1, None  # one group of all columns: every rank has its scale
        if self.group > 0:
            check_multiple(layer, self.group, k, [], "group")
            groups, input_dim = k // self.group, 1
        dtype = params_dtype if params_dtype.itemsize > 2 else self.scale_dtype or params_dtype
        columns = k // self.per_byte
        register(layer, "weight", (n, columns), torch.uint8, input_dim=1, output_dim=0, **extra_weight_attrs)
        shared: dict[str, Any] = {"input_dim": input_dim, "output_dim": 0, **extra_weight_attrs}
        register(layer, "weight_scale", (n, groups), dtype, **shared)
        if self.zeros:
            register(layer, "weight_zero", (n, groups), torch.uint8, **shared)
        layer.register_buffer("columns", None, persistent=False)
        if self.act_order:
            if k != input_size:
                name = getattr(layer, "prefix", "") or type(layer).__name__
                raise ValueError(
                    f"{name}: act order (desc_act) is not supported with columns on several ranks"
                )
            register(layer, "g_idx", (k,), torch.int32, weight_loader=self._load_order)
            layer.g_idx.data.fill_(-1)  # type: ignore[union-attr, operator]

    def _load_order(self, parameter: nn.Parameter, loaded: torch.Tensor, *shard: Any) -> None:
        """Copy the groups of the columns; matrices that are packed into one weight have the same."""
        if loaded.shape != parameter.shape:
            raise ValueError(f"expected shape {tuple(parameter.shape)}")
        if loaded.is_meta:
            return
        groups = torch.arange(len(loaded), device=loaded.device) // self.group
        if not torch.equal(loaded.long().sort().values, groups):
            raise ValueError(f"expected {self.group} columns of each group")
        loaded = loaded.to(parameter)
        if parameter.data[0] >= 0 and not torch.equal(parameter.data, loaded):
            raise ValueError("matrices that are one weight here must have the same order of columns")
        parameter.data.copy_(loaded)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weight in tiles; with act order, sort its columns: `layer.columns` [K] has their places in x."""
        if self.act_order:
            self._sort(layer)
        self._tile(layer)

    def _sort(self, layer: Any) -> None:
        groups = layer.g_idx.data
        del layer.g_idx
        if groups.is_meta:
            layer.columns = groups
            return
        order = groups.argsort(stable=True)
        if not torch.equal(order, torch.arange(len(order), device=order.device)):
            layer.columns = order.int()
            layer.weight.data.copy_(self._sorted(layer.weight.data, order))

    def _tile(self, layer: Any) -> None:
        parameters = layer.weight, layer.weight_scale, layer.weight_zero if self.zeros else None
        for parameter, tiles in zip(parameters, tile_int4(*parameters), strict=True):
            if tiles is not None:
                parameter.data.copy_(tiles)

    def _sorted(self, weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return pack_int4(unpack_int4(weight)[:, order])

    def _floats(self, layer: Any) -> torch.Tensor:
        zero = layer.weight_zero if self.zeros else None
        return dequantize_int4(*untile_int4(layer.weight, layer.weight_scale, zero), torch.float32)

    def dequantize(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        dense = self._floats(layer)
        return dense if layer.columns is None else dense[:, layer.columns.argsort()]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        zero = layer.weight_zero if self.zeros else None
        if layer.columns is not None:
            x = x.index_select(-1, layer.columns)
        return linear_int4(x, layer.weight, layer.weight_scale, zero, bias)


class Int8Weight(Int4LinearMethod):
    """The same with 8 bits, for DequantizedMethod: no op multiplies such weights with unquantized x."""

    per_byte, middle = 1, 128

    def _sorted(self, weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return weight[:, order]

    def _tile(self, layer: Any) -> None:
        pass

    def _floats(self, layer: Any) -> torch.Tensor:
        zero = layer.weight_zero.float().unsqueeze(-1) if self.zeros else self.middle
        q = layer.weight.float().unflatten(-1, (layer.weight_scale.shape[1], -1))
        return ((q - zero) * layer.weight_scale.float().unsqueeze(-1)).flatten(-2)


class TernaryLinearMethod:
    """Weights -1, 0 and 1, packed as in the op `linear_ternary`, with weight_scale [N].

    A scale of a whole matrix is repeated for its rows. With several ranks, each quantizes its own part of x.
    """

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        n, k = sum(output_partition_sizes), input_size_per_partition
        check_multiple(layer, TERNARY_UNIT, k, [], "packing")
        register(layer, "weight", (n, k // 4), torch.uint8, input_dim=1, output_dim=0, **extra_weight_attrs)
        register(
            layer, "weight_scale", (n,), torch.float32, output_dim=0, per_matrix=True, **extra_weight_attrs
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: the weight was packed while it was read."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        return (unpack_ternary(layer.weight).float() - 1) * layer.weight_scale[:, None]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear_ternary(x, layer.weight, layer.weight_scale, bias)


class Nvfp4LinearMethod:
    """Weights in NVFP4 for the op `linear_nvfp4`, which multiplies x as it is.

    Loaded are weight [N, K / 2] (even columns in the low half of a byte), weight_scale [N, K / 16] in float8 and
    weight_factor [N], the factor of each matrix, repeated for its rows. Weight and scales are in tiles after loading.
    """

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        n, k = sum(output_partition_sizes), input_size_per_partition
        check_multiple(layer, UNIT, k, [], "packing")
        both: dict[str, Any] = {"input_dim": 1, "output_dim": 0, **extra_weight_attrs}
        register(layer, "weight", (n, k // 2), torch.uint8, **both)
        register(layer, "weight_scale", (n, k // NVFP4_GROUP), FP8, **both)
        register(
            layer, "weight_factor", (n,), torch.float32, output_dim=0, per_matrix=True, **extra_weight_attrs
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weight and its scales in the op's order."""
        weight, scale = from_checkpoint(layer.weight.data, layer.weight_scale.data)
        layer.weight.data.copy_(weight)
        layer.weight_scale.data.copy_(scale)

    def dequantize(self, layer: Any) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        return dequantized(layer.weight, layer.weight_scale, layer.weight_factor)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear_nvfp4(x, layer.weight, layer.weight_scale, layer.weight_factor, bias)


class DequantizedMethod:
    """A quantized weight that is dequantized once after loading: then the layer is an unquantized one."""

    def __init__(self, stored: Any) -> None:
        self.stored = stored

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        self.stored.create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip
        self.dtype = params_dtype

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replace the loaded parameters by the weight."""
        self.stored.process_weights_after_loading(layer)
        dense = self.stored.dequantize(layer).to(self.dtype)
        for name in [name for name in layer._parameters if name != "bias"]:
            delattr(layer, name)
        layer.weight = nn.Parameter(dense, requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)


def check_multiple(layer: Any, unit: int, columns: int, rows: list[int], what: str) -> None:
    """Raise ValueError unless all matrices but the last, and the columns, are whole multiples of `unit` on a rank."""
    name = getattr(layer, "prefix", "") or type(layer).__name__
    if columns % unit:
        raise ValueError(f"{name}: {columns} columns on a rank are not a multiple of the {what} size {unit}")
    wrong = [n for n in rows[:-1] if n % unit]
    if wrong:
        advice = ": use fewer ranks" if getattr(layer, "tp_size", 1) > 1 else ", which is not supported"
        raise ValueError(
            f"{name}: matrices of {', '.join(map(str, rows))} rows on a rank share blocks of {unit} rows{advice}"
        )
