"""Layers and tensors of quantized checkpoints: from a Scheme to a layer's method, from a tensor to its parameter.

A layer's parameters have one layout for all checkpoints (see overrides/linear/quantized.py). Each tensor is converted
by itself, on the way from the file to the parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import nn

from fastkernels.models.common import registry
from fastkernels.models.common.quantization import Scheme, read
from fastkernels.overrides.linear.parallel_linear import LinearMethod, Methods, ParallelLinear
from fastkernels.overrides.linear.quantized import Fp8LinearMethod

log = logging.getLogger("fastkernels")
MARK = "weight_scale"  # the parameter that every quantized layer has
NOT_READ = (
    "k_scale",
    "v_scale",
    "q_scale",
    "k_zero_point",
    "v_zero_point",
)  # the KV cache has the model's dtype

Convert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
# {name of a tensor in a layer: ((parameter, conversion), ...)}; with a parameter "", the conversion is only a check
Tensors: TypeAlias = Mapping[str, tuple[tuple[str, Convert], ...]]


def methods(config: Any) -> Methods | None:
    """The method of each linear layer of a config's model, by prefix; None if the model is not quantized."""
    scheme = read(config)
    if scheme is None:
        return None
    arch, make = registry.find(config.architectures[0]).arch, _method(scheme)
    announce(scheme)
    return lambda prefix: make() if scheme.quantizes(prefix, arch) else None


@lru_cache
def announce(scheme: Scheme) -> None:
    """Log once what is not done in the checkpoint's number format."""
    if scheme.kind == "nvfp4":
        log.warning("NVFP4 weights are dequantized while they are loaded: no kernel here multiplies them")


def _method(scheme: Scheme) -> Callable[[], LinearMethod]:
    return lambda: Fp8LinearMethod(scheme.kind == "fp8_block", scheme.static)


class Reader:
    """The tensors of a checkpoint and the parameters that they become."""

    def __init__(self, config: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        scheme = read(config)
        self.tensors: Tensors = {} if scheme is None else _tensors(scheme)
        self.parameters = parameters
        self.names = {p: name for name, parts in reversed(list(self.tensors.items())) for p, _ in parts if p}

    def targets(self, name: str) -> tuple[tuple[str, Convert], ...]:
        """(parameter, conversion) of a tensor, whose name has the layer's name in our model."""
        layer, _, own = name.rpartition(".")
        if self.tensors and own in NOT_READ:
            return ()
        if own in self.tensors and self._quantized(layer):
            return tuple((p and f"{layer}.{p}", convert) for p, convert in self.tensors[own])
        return ((name, same),)

    def checkpoint_name(self, parameter: str) -> str:
        """The name of a parameter's tensor, before the layer is renamed."""
        layer, _, own = parameter.rpartition(".")
        return f"{layer}.{self.names.get(own, own)}" if self._quantized(layer) else parameter

    def _quantized(self, layer: str) -> bool:
        return f"{layer}.{MARK}" in self.parameters


def finish(model: nn.Module) -> None:
    """Let the layers change their parameters after all are loaded."""
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            module.quant_method.process_weights_after_loading(module)


def same(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, as a conversion."""
    return tensor


def _row_scale(tensor: torch.Tensor) -> torch.Tensor:
    """A scale per tensor, or per row [N, 1], as [1] or [N]."""
    return tensor.reshape(-1) if tensor.dim() != 2 or tensor.shape[1] == 1 else tensor


def _tensors(scheme: Scheme) -> Tensors:
    static = {"input_scale": (("input_scale", same),) if scheme.static else ()}
    scale = (("weight_scale", same if scheme.kind == "fp8_block" else _row_scale),)
    weight = (("weight", same),)
    if scheme.layout == "fp8":
        names = ("weight_scale_inv", "weight_scale")
        first, second = names if scheme.kind == "fp8_block" else names[::-1]
        old = {"activation_scale": static["input_scale"]}
        return {"weight": weight, first: scale, second: scale, **static, **old}
    return {"weight": weight, "weight_scale": scale, **static}
