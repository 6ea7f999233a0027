"""Gated feed-forward block, y = (silu(x Wg^T) * (x Wu^T)) Wd^T (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import assemble
from fastkernels.core.spec import Axis, Case, OpSpec, Tensor, fan_in


def reference(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x: [..., H]; gate_up: [2 I, H], gate rows first; down: [H, I]. Returns [..., H] in x's dtype."""
    acc = torch.promote_types(x.dtype, torch.float32)
    gate, up = (x.to(acc) @ gate_up.to(acc).t()).chunk(2, dim=-1)
    return ((F.silu(gate) * up) @ down.to(acc).t()).to(x.dtype)


def check_activation(hidden_act: str) -> None:
    """Raise ValueError unless the activation of a config is silu."""
    if hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {hidden_act!r} is not supported, only 'silu'")


def _unsupported(module: nn.Module) -> str | None:
    """Return why a packed gated MLP (ours or a host's) is not plain silu between unquantized layers, or None."""
    for name in ("gate_up_proj", "act_fn", "down_proj"):
        if not hasattr(module, name):
            return f"it has no {name}"
    act = type(module.act_fn).__name__
    if not act.endswith("SiluAndMul"):
        return f"act_fn is {act}, not SiluAndMul"
    for name in ("gate_up_proj", "down_proj"):
        # With a quantized layer, the hosts fuse the activation with the quantization of its input.
        layer = getattr(module, name)
        layer = getattr(layer, "base_layer", layer)  # inside a LoRA wrapper, which our forward calls
        method = type(getattr(layer, "quant_method", None)).__name__
        if not method.endswith("UnquantizedLinearMethod") and "UnquantizedLinearMethod" not in method:
            return f"{name} is quantized by {method}"
    return None


class PackedMLP(nn.Module):
    """Base of vLLM's and SGLang's LlamaMLP: maps x [T, hidden_size] to [T, hidden_size] with hidden_act 'silu'."""

    gate_up_proj: nn.Module
    act_fn: nn.Module
    down_proj: nn.Module

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, gate_up, down = args
    hidden, inner = down.shape
    if assemble.takes(cls, "config"):
        config = SimpleNamespace(
            hidden_size=hidden,
            intermediate_size=inner,
            shared_intermediate_size=inner,
            hidden_act="silu",
            mlp_bias=False,
            residual_dropout=0.0,
        )
        module = assemble.make(cls, x, config)
    elif assemble.takes(cls, "gate_last"):
        module = assemble.make(cls, x, hidden, 2 * inner, hidden, nn.SiLU, bias=False, gate_last=False)
    elif assemble.takes(cls, "align_to"):
        module = assemble.make(cls, x, hidden, inner, hidden, bias=False)
    elif assemble.takes(cls, "output_size"):
        module = assemble.make(cls, x, hidden, inner, hidden, "silu")
    else:
        module = assemble.make(cls, x, hidden, inner, "silu", prefix="mlp")
    parts = {"gate_up_proj": gate_up, "down_proj": down}
    if hasattr(module, "fc1"):
        parts = {"fc1": gate_up, "fc2": down}
    elif hasattr(module, "input_linear"):
        parts = {"input_linear": gate_up, "output_linear": down}
    elif hasattr(module, "fc1_g"):
        parts = dict(zip(("fc1_g", "fc1_x", "fc2"), (*gate_up.chunk(2), down), strict=True))
    elif not hasattr(module, "gate_up_proj"):
        parts = dict(zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True))
    return partial(assemble.load(module, {f"{name}.weight": t for name, t in parts.items()}), x)


def _case(name: str, tokens: int, hidden: int, intermediate: int, tag: str, dtype: str = "bfloat16") -> Case:
    return Case(name, {"tokens": tokens, "hidden": hidden, "intermediate": intermediate}, dtype, tags=(tag,))


SPEC = OpSpec(
    name="gated_mlp",
    level=2,
    by_default=True,
    reference=reference,
    cases=(
        _case("decode_1", 1, 4096, 14336, "model"),
        _case("decode_32", 32, 4096, 14336, "model"),
        _case("prefill_8k", 8192, 4096, 14336, "model"),
        _case("one", 1, 1, 1, "odd", "float32"),
        _case("odd_63", 63, 72, 130, "odd"),
        _case("odd_5", 5, 100, 63, "odd", "float32"),
        _case("odd_9", 9, 33, 257, "odd", "float32"),
        _case("narrow", 70, 8, 3, "odd", "float32"),
        _case("smollm2", 1, 192, 512, "odd", "float32"),
        _case("wide", 3, 257, 40, "odd", "float32"),
        _case("half", 7, 64, 48, "odd", "float16"),
    ),
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("gate_up", "2*intermediate hidden", values=fan_in),
        Tensor("down", "hidden intermediate", values=fan_in),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={"tokens": Axis.per_call(), "hidden": Axis.width(), "intermediate": Axis.width()},
    flops="6 * tokens * hidden * intermediate",
    build=_build,
    calls=("linear", "silu_and_mul"),
)  # fmt: skip
