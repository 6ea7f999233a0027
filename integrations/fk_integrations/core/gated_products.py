"""Gated products of a model: a layer with packed gate and up, and the SiluAndMul that activates its result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fk_integrations.core.host_op import HostOp

if TYPE_CHECKING:
    from fastkernels.core.dispatch import Op

NAME = "linear_silu_and_mul"
APART = "linear", "silu_and_mul"
LAYER = "MergedColumnParallelLinear"  # in the names of hosts' classes, of ours and of LoRA's wrappers
ACTIVATIONS = "SiluAndMul", "VllmSiluAndMul", "SGLangSiluAndMul"
LIMITS = "swiglu_limit", "limit"  # attributes of blocks, None where gate and up are not clamped


@dataclass(frozen=True)
class Gated:
    """A block whose layer has packed gate and up, and whose activation is SiluAndMul."""

    block: Any
    layer: Any
    activation: Any

    @property
    def unsupported(self) -> str | None:
        """Why the op does not compute both; None if it does."""
        layer, method = self.layer, type(getattr(self.layer, "quant_method", None)).__name__
        if hasattr(layer, "base_layer"):
            return "a LoRA adapter adds to the product before the activation"
        if "UnquantizedLinearMethod" not in method:
            return f"its product of gate and up is quantized by {method}"
        if any(getattr(self.block, name, None) is not None for name in LIMITS):
            return "it clamps gate and up, with a function of its own in the place of SiluAndMul"
        sizes = list(getattr(layer, "output_sizes", ()))
        if len(sizes) != 2 or sizes[0] != sizes[1]:
            return f"its packed parts have {sizes} rows, not those of gate and up"
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        if weight is None or weight.dim() != 2 or not weight.numel() or weight.shape[0] % 2:
            return "the host packed or freed its weight after loading"
        if getattr(layer, "use_intel_amx_backend", False):
            return "the host packed its weight for AMX"
        if bias is not None and getattr(layer, "skip_bias_add", False):
            return "its bias is added after the product (skip_bias_add)"
        if getattr(layer, "gather_output", False) and getattr(layer, "tp_size", 1) > 1:
            return "the ranks gather the product before the activation"
        return None


def of_model(model: Any) -> Iterator[Gated]:
    """The blocks with one such layer and one such activation."""
    for block in model.modules():
        children = list(block.children())
        layers = [c for c in children if LAYER in type(c).__name__]
        activations = [c for c in children if type(c).__name__ in ACTIVATIONS]
        if len(layers) == len(activations) == 1:
            yield Gated(block, layers[0], activations[0])


class GatedProduct(HostOp):
    """linear_silu_and_mul, which no class of a host is: it runs in the place of two modules."""

    def layers(self, op: Op, model: Any) -> Sequence[Any]:
        return [gated.layer for gated in of_model(model) if gated.unsupported is None]
