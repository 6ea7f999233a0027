"""Activations of MLPs: their names in configs, the ops that plans list, and the classes that models are built of.

One table for decoders, encoders and plans. Neither torch nor an op is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_VLLM = "fastkernels.overrides.activation.vllm"


@dataclass(frozen=True)
class Activation:
    """An activation of ours.

    names      in transformers' configs
    op         of act(x); module: its class as "module:Class"
    gated_op   of act(gate) * up with a packed input; gated: its class. '': `op` on the gate, then a product
    arguments  of both ops; built: arguments of both classes
    """

    names: tuple[str, ...]
    op: str
    module: str
    gated_op: str = ""
    gated: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    built: tuple[Any, ...] = ()


TABLE: dict[str, Activation] = {
    "silu": Activation(("silu", "swish"), "silu", "torch.nn:SiLU", "silu_and_mul", f"{_VLLM}:VllmSiluAndMul"),
    "gelu": Activation(
        ("gelu", "gelu_python"), "gelu", f"{_VLLM}:VllmGELU", "gelu_and_mul", f"{_VLLM}:VllmGeluAndMul"
    ),
    "gelu_tanh": Activation(
        ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"), "gelu",
        f"{_VLLM}:VllmGELUTanh", "gelu_and_mul", f"{_VLLM}:VllmGeluAndMul", {"approximate": "tanh"}, ("tanh",),
    ),
    "quick_gelu": Activation(("quick_gelu",), "quick_gelu", f"{_VLLM}:VllmQuickGELU"),
    "relu2": Activation(("relu2", "sqrelu"), "relu2", f"{_VLLM}:VllmReLUSquaredActivation"),
    "relu": Activation(("relu",), "relu", "torch.nn:ReLU"),
}  # fmt: skip
NAMES = {
    name: ours for ours, found in TABLE.items() for name in found.names
}  # {of transformers' configs: ours}


def op_of(name: str, gated: bool) -> tuple[str, dict[str, str]]:
    """(op, its arguments) of one of ours."""
    found = TABLE[name]
    return (found.gated_op if gated and found.gated_op else found.op), dict(found.arguments)
