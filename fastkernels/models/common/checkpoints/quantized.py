"""Layers and tensors of quantized checkpoints: from a Scheme to a layer's method, from a tensor to its parameter.

A layer's parameters have one layout for all checkpoints (see overrides/linear/quantized.py). Each tensor is converted
by itself, on the way from the file to the parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import nn

from fastkernels.models.common.checkpoints.quantization import DENSE, Scheme, read
from fastkernels.models.common.descriptions import registry
from fastkernels.overrides.linear.linear_int4 import MIDDLE, pack_int4
from fastkernels.overrides.linear.linear_ternary import UNIT, pack_ternary
from fastkernels.overrides.linear.parallel_linear import Methods, ParallelLinear
from fastkernels.overrides.linear.quantized import (
    DequantizedMethod,
    Fp8LinearMethod,
    Int4LinearMethod,
    Int8Weight,
    Nvfp4LinearMethod,
    TernaryLinearMethod,
)
from fastkernels.overrides.moe.quantized import Fp8ExpertsMethod, Int4ExpertsMethod, Nvfp4ExpertsMethod
from fastkernels.overrides.moe.sparse_moe import Experts

log = logging.getLogger("fastkernels")
MARK = "weight_scale"  # the parameter that every quantized layer has
ORDERS = ("g_idx", "weight_g_idx")  # the group of each column
MATRICES = ("w13", "w2")  # of stacked experts, before the names of their parameters
# Of a KV cache in 8 bits: ours has the model's dtype.
NOT_READ = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "k_zero_point", "v_zero_point")

Convert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
# {name of a tensor in a layer: ((parameter, conversion), ...)}; with a parameter "", the conversion is only a check
Tensors: TypeAlias = Mapping[str, tuple[tuple[str, Convert], ...]]


def methods(config: Any) -> Methods | None:
    """The method of each linear layer of a config's model, by prefix; None if the model is not quantized."""
    quantization = read(config)
    if quantization is None:
        return None
    arch = registry.find(config.architectures[0], config).arch

    def method(prefix: str) -> Any:
        scheme, own = quantization.of(prefix, arch), prefix.rpartition(".")[2]
        if scheme is None:
            return None
        if own == "experts" and arch.experts:
            return _experts_method(scheme)
        made = _method(scheme)
        if scheme.dense:
            announce(scheme.kind)
        return DequantizedMethod(made) if own in DENSE or scheme.dense else made

    return method


@lru_cache
def announce(kind: str) -> None:
    """Log once what is not done in the checkpoint's number format."""
    what = "8-bit integer weights" if kind == "int8" else "float8 weights with unquantized activations"
    log.warning(f"{what} are dequantized while they are loaded: no kernel here multiplies them")


@lru_cache
def announce_cache() -> None:
    log.warning("the KV cache has the model's dtype: the checkpoint's scales for one in 8 bits are not used")


def _method(scheme: Scheme) -> Any:
    if scheme.kind in ("int4", "int8"):
        method = Int4LinearMethod if scheme.kind == "int4" else Int8Weight
        return method(scheme.group, scheme.zeros, _scale_dtype(scheme), scheme.act_order)
    if scheme.kind == "nvfp4":
        return Nvfp4LinearMethod()
    if scheme.kind == "ternary":
        return TernaryLinearMethod()
    return Fp8LinearMethod(scheme.kind == "fp8_block", scheme.static)


def _experts_method(scheme: Scheme) -> Any:
    if scheme.kind == "int4":
        return Int4ExpertsMethod(scheme.group, scheme.zeros, _scale_dtype(scheme))
    if scheme.kind == "nvfp4":
        return Nvfp4ExpertsMethod()
    return Fp8ExpertsMethod(scheme.kind == "fp8_block", scheme.static)


def _scale_dtype(scheme: Scheme) -> torch.dtype | None:
    """GPTQ and AWQ have scales in float16; in bfloat16 they would lose three bits."""
    return torch.float16 if scheme.layout in ("gptq", "gptq_v2", "awq") else None


class Reader:
    """The tensors of a checkpoint and the parameters that they become."""

    def __init__(self, config: Any, model: nn.Module) -> None:
        self.quantization, self.model = read(config), model
        self.arch = registry.find(config.architectures[0], config).arch
        self.parameters = dict(model.named_parameters())
        self.schemes: dict[str, Scheme | None] = {}

    def targets(self, name: str) -> tuple[tuple[str, Convert], ...]:
        """(parameter, conversion) of a tensor, whose name has the layer's name in our model."""
        layer, own = self._split(name)
        if self.quantization and own in NOT_READ:
            announce_cache()
            return ()
        scheme = self._scheme(layer)
        if scheme is None:
            return ((name, same),)
        if own == "bias" and name not in self.parameters:
            return (("", _no_bias),)
        if own in ORDERS and layer + "g_idx" not in self.parameters:
            return (("", partial(_in_order, scheme.group, self._columns(layer))),)
        tensors = _tensors(scheme)
        if own in tensors:
            return tuple((p and layer + p, convert) for p, convert in tensors[own])
        return ((name, _unquantized if own == "weight" else same),)

    def _scheme(self, layer: str) -> Scheme | None:
        """The format of a layer with its separator, of a matrix of experts."""
        if self.quantization is None or layer + MARK not in self.parameters:
            return None
        if layer not in self.schemes:
            self.schemes[layer] = self.quantization.of(layer.rpartition(".")[0], self.arch)
        return self.schemes[layer]

    def _columns(self, layer: str) -> int:
        """The columns of a weight on all ranks."""
        path, _, matrix = layer.rpartition(".")
        owner: Any = self.model.get_submodule(path)
        if not matrix:
            return owner.input_size
        weight = self.parameters[layer + "weight"]
        return 2 * weight.shape[-1] * (owner.tp_size if matrix.startswith("w2") else 1)

    def checkpoint_name(self, parameter: str) -> str:
        """The name of a parameter's tensor, before the layer is renamed."""
        layer, own = self._split(parameter)
        scheme = self._scheme(layer)
        tensors = {} if scheme is None else _tensors(scheme)
        return layer + next((name for name, parts in tensors.items() if own in dict(parts)), own)

    def _split(self, name: str) -> tuple[str, str]:
        """The layer with its separator, and a tensor's own name: stacked experts have w13_weight and w2_weight."""
        layer, dot, own = name.rpartition(".")
        matrix, line, rest = own.partition("_")
        if line and matrix in MATRICES:
            return f"{layer}.{matrix}_", rest
        return layer + dot, own


def finish(model: nn.Module) -> None:
    """Let the layers change their parameters after all are loaded."""
    for module in model.modules():
        if isinstance(module, ParallelLinear | Experts):
            module.quant_method.process_weights_after_loading(module)


def same(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, as a conversion."""
    return tensor


def _unquantized(tensor: torch.Tensor) -> torch.Tensor:
    raise ValueError("it is not quantized, and config.quantization_config does not leave its layer out")


def _row_scale(tensor: torch.Tensor) -> torch.Tensor:
    """A scale per tensor, or per row [N, 1], as [1] or [N]."""
    if tensor.dim() > 2:
        raise ValueError("expected one or [N]")
    return tensor.reshape(-1) if tensor.dim() != 2 or tensor.shape[1] == 1 else tensor


def _scale_of_each_row(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 1:
        raise ValueError("expected a scale for each row (strategy 'channel')")
    return _row_scale(tensor)


def _one(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() != 1:
        raise ValueError("expected one value")
    return tensor.reshape(1)


def _check_matrix(tensor: torch.Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError("expected two dimensions")


def _no_bias(tensor: torch.Tensor) -> torch.Tensor:
    """AutoGPTQ gives each layer a bias, which is zero where the model has none."""
    if not tensor.is_meta and tensor.any():
        raise ValueError("the model has no bias there, and it is not zero")
    return tensor


def _integers(
    words: torch.Tensor, dim: int, bits: int = 4, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The integers of each int32 along `dim` as uint8; order: the place in the word of the first, second, ..."""
    _check_matrix(words)
    if words.dtype != torch.int32:
        raise ValueError(f"its dtype is {words.dtype}, not torch.int32 with integers of {bits} bits")
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32, device=words.device)
    shifts = bits * (places[:, None] if dim == 0 else places)
    values = words.unsqueeze(dim + 1) >> shifts & (1 << bits) - 1
    return values.flatten(dim, dim + 1).to(torch.uint8)


def _packed(values: torch.Tensor) -> torch.Tensor:
    if values.shape[1] % 32:
        raise ValueError(f"{values.shape[1]} columns are not a multiple of 32")
    return pack_int4(values.contiguous())


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    _check_matrix(tensor)
    return tensor.t()


def _in_order(group: int, columns: int, found: torch.Tensor) -> torch.Tensor:
    """Check that the groups of a g_idx are neighbouring columns."""
    if found.shape != (columns,):
        raise ValueError(f"expected {columns} values, one for each column")
    size = group if group > 0 else columns
    if not found.is_meta and not torch.equal(
        found.long(), torch.arange(columns, device=found.device) // size
    ):
        raise ValueError(
            "its columns are not grouped in their order: act order is supported in linear layers, not in experts,"
            " and desc_act (GPTQ) or actorder (compressed-tensors) must be in the config"
        )
    return found


def _input_scale(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta and tensor.le(0).any():
        raise ValueError(f"an input's scale must be above 0, got {tensor.min().item():g}")
    return tensor


def _zeros(scheme: Scheme, unpack: Convert) -> tuple[tuple[str, Convert], ...]:
    """Where zero points go: to their parameter, or to a check that they are what a weight without them has."""

    def check(found: torch.Tensor) -> torch.Tensor:
        values = unpack(found)
        middle = MIDDLE if scheme.kind == "int4" else Int8Weight.middle
        if not values.is_meta and not values.eq(middle).all():
            raise ValueError(f"a symmetric weight has zero points other than {middle}")
        return values

    return (("weight_zero", unpack),) if scheme.zeros else (("", check),)


def _from_int8(values: torch.Tensor) -> torch.Tensor:
    """Add 128 to signed integers."""
    return _of_dtype(torch.int8, values).view(torch.uint8) ^ Int8Weight.middle


def _integer_tensors(scheme: Scheme) -> Tensors:
    bits, pack = (4, _packed) if scheme.kind == "int4" else (8, same)
    if scheme.layout == "int-quantized":
        unused = dict.fromkeys(("input_scale", "input_zero_point"), ())
        return {"weight": (("weight", _from_int8),), "weight_scale": (("weight_scale", same),), **unused}
    if scheme.layout == "compressed-tensors":
        return {
            "weight_packed": (("weight", lambda t: pack(_integers(t, 1, bits))),),
            "weight_scale": (("weight_scale", same),),
            "weight_zero_point": _zeros(scheme, lambda t: _integers(t, 0, bits)),
            "weight_shape": (),
            "weight_g_idx": (("g_idx", same),),
        }
    scales = (("weight_scale", _transposed),)
    if scheme.layout == "awq":
        # Words hold columns 0, 2, 4, 6, 1, 3, 5, 7.
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        return {
            "qweight": (("weight", lambda t: _packed(_integers(t, 1, 4, order).t())),),
            "scales": scales,
            "qzeros": _zeros(scheme, lambda t: _integers(t, 1, 4, order).t()),
        }
    one = int(scheme.layout == "gptq")  # the first version stores zero points less one
    return {
        "qweight": (("weight", lambda t: pack(_integers(t, 0, bits).t())),),
        "scales": scales,
        "qzeros": _zeros(scheme, lambda t: _integers(t, 1, bits).t() + one),
        "g_idx": (("g_idx", same),),
    }


def _ternary(values: torch.Tensor) -> torch.Tensor:
    """Pack integers 0 to 2 [N, K]."""
    _check_matrix(values)
    if values.shape[1] % UNIT:
        raise ValueError(f"{values.shape[1]} columns are not a multiple of {UNIT}")
    if not values.is_meta and values.gt(2).any():
        raise ValueError("it has a weight other than -1, 0 and 1")
    return pack_ternary(values.contiguous())


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """BitNet's packing: each quarter of the rows has two bits of the bytes [N / 4, K]."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"its dtype is {packed.dtype}, not torch.uint8 with four weights in each")
    return _ternary(torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)]))


def _mean(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().abs().mean().clamp(min=1e-5).reshape(1)


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """Weights before quantization, divided by their mean absolute value."""
    if not weight.is_floating_point() or weight.dtype.itemsize == 1:
        raise ValueError(f"its dtype is {weight.dtype}, not a float of at least 16 bits, before quantization")
    return _ternary(((weight.float() * _mean(weight).reciprocal()).round().clamp(-1, 1) + 1).to(torch.uint8))


def _ternary_tensors(scheme: Scheme) -> Tensors:
    if scheme.layout == "online":
        return {"weight": (("weight", _rounded), ("weight_scale", _mean))}
    divides = scheme.layout == "bitlinear"
    scale = (("weight_scale", (lambda t: _reciprocal(t.float())) if divides else same),)
    return {"weight": (("weight", _quarters),), "weight_scale": scale}


def _of_dtype(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself. Raises ValueError for another dtype: its bits would mean something else."""
    if tensor.dtype != dtype:
        raise ValueError(f"its dtype is {tensor.dtype}, not {dtype}")
    return tensor


def _reciprocal(divisor: torch.Tensor) -> torch.Tensor:
    if not divisor.is_floating_point():
        raise ValueError(f"its dtype is {divisor.dtype}")
    if not divisor.is_meta and not (divisor.isfinite() & divisor.ne(0)).all():
        raise ValueError(f"weights are divided by it, and it is {divisor.flatten()[0].item():g}")
    return _one(divisor).reciprocal()


def _nvfp4_scale(scale: torch.Tensor) -> torch.Tensor:
    _of_dtype(torch.float8_e4m3fn, scale)
    if not scale.is_meta and scale.view(torch.uint8).gt(0x7E).any():
        raise ValueError("it has a scale that is negative or NaN")
    return scale


def _nvfp4_tensors(scheme: Scheme) -> Tensors:
    weight = (("weight", partial(_of_dtype, torch.uint8)),)
    scale = {"weight_scale": (("weight_scale", _nvfp4_scale),)}
    if scheme.layout == "modelopt":
        factor = (("weight_factor", _one),)
        return {"weight": weight, **scale, "weight_scale_2": factor, "input_scale": ()}
    divisor = (("weight_factor", _reciprocal),)
    return {"weight_packed": weight, "weight_global_scale": divisor, **scale, "input_global_scale": ()}


def _block_scale(scale: torch.Tensor) -> torch.Tensor:
    """Scales of blocks, also [N, 1, K, 1], and powers of two by their exponents."""
    scale = scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
    return scale.flatten(2).flatten(0, 1) if scale.dim() == 4 and scale.shape[1::2] == (1, 1) else scale


@lru_cache
def _tensors(scheme: Scheme) -> Tensors:
    if scheme.kind in ("int4", "int8"):
        return _integer_tensors(scheme)
    if scheme.kind == "nvfp4":
        return _nvfp4_tensors(scheme)
    if scheme.kind == "ternary":
        return _ternary_tensors(scheme)
    static = {"input_scale": (("input_scale", _input_scale),) if scheme.static else (), "input_scale_ub": ()}
    by_row = _scale_of_each_row if scheme.by_row else _row_scale
    scale = (("weight_scale", _block_scale if scheme.kind == "fp8_block" else by_row),)
    weight = (("weight", same),)
    if scheme.layout == "fp8":
        names = ("weight_scale_inv", "weight_scale")
        first, second = names if scheme.kind == "fp8_block" else names[::-1]
        old = {"activation_scale": static["input_scale"]}
        return {"weight": weight, first: scale, second: scale, **static, **old}
    return {"weight": weight, "weight_scale": scale, **static}
