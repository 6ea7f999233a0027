"""Feed-forward block gated by GELU, y = (gelu(x Wg^T) * (x Wu^T)) Wd^T (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import assemble
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, fan_in

# The classes of transformers' activations, by what they compute.
ERF = ("GELUActivation",)
TANH = ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")


def reference(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, approximate: str = "tanh"
) -> torch.Tensor:
    """x: [..., H]; gate_up: [2 I, H], gate rows first; down: [H, I]; approximate: 'none' (erf) or 'tanh'.

    Returns [..., H] in x's dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    gate, up = (x.to(acc) @ gate_up.to(acc).t()).chunk(2, dim=-1)
    return ((F.gelu(gate, approximate=approximate) * up) @ down.to(acc).t()).to(x.dtype)


class GatedGeluMLP(nn.Module):
    """Base of classes whose live instances leave no work to their activation module."""


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, gate_up, down, approximate = assemble.filled(args, 4, "tanh")
    hidden, inner = down.shape
    act = "gelu_pytorch_tanh" if approximate == "tanh" else "gelu"
    config = SimpleNamespace(hidden_size=hidden, intermediate_size=inner, hidden_act=act)
    parts = dict(zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True))
    module = assemble.make(cls, x, config)
    return partial(assemble.load(module, {f"{name}.weight": t for name, t in parts.items()}), x)


def _case(
    name: str,
    tokens: int,
    hidden: int,
    intermediate: int,
    tag: str,
    dtype: str = "bfloat16",
    act: str = "tanh",
) -> Case:
    dims = {"tokens": tokens, "hidden": hidden, "intermediate": intermediate}
    return Case(name, {**dims, "approximate": act} if act != "tanh" else dims, dtype, tags=(tag,))


SPEC = OpSpec(
    name="gated_gelu_mlp",
    level=2,
    by_default=True,
    reference=reference,
    cases=(  # Gemma 2 9B
        _case("decode_1", 1, 3584, 14336, "model"),
        _case("decode_32", 32, 3584, 14336, "model"),
        _case("prefill_8k", 8192, 3584, 14336, "model"),
        _case("one", 1, 1, 1, "odd", "float32"),
        _case("odd_63", 63, 72, 130, "odd"),
        _case("odd_5", 5, 100, 63, "odd", "float32", "none"),
        _case("odd_9", 9, 33, 257, "odd", "float32"),
        _case("narrow", 70, 8, 3, "odd", "float32"),
        _case("wide", 3, 257, 40, "odd", "float32", "none"),
        _case("half", 7, 64, 48, "odd", "float16"),
    ),
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("gate_up", "2*intermediate hidden", values=fan_in),
        Tensor("down", "hidden intermediate", values=fan_in),
        Scalar("approximate", default="tanh"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={"tokens": Axis.per_call(), "hidden": Axis.width(), "intermediate": Axis.width()},
    flops="6 * tokens * hidden * intermediate",
    build=_build,
    calls=("linear", "gelu_and_mul"),
)  # fmt: skip
