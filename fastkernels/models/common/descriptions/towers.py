"""The modules of vision towers as a description has them, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastkernels.models.common.descriptions import activations


@dataclass(frozen=True)
class Part:
    """A module: see plan.Item. Tokens of a text read nothing of it."""

    path: str
    op: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layout: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


def linear(path: str, rows: int, columns: int, layout: str = "") -> Part:
    return Part(path, "linear", {"weight": (rows, columns), "bias": (rows,)}, layout)


def layer_norm(path: str, size: int) -> Part:
    return Part(path, "layer_norm", {"weight": (size,), "bias": (size,)})


def rms_norm(path: str, size: int) -> Part:
    return Part(path, "rms_norm", {"weight": (size,)})


def activation(path: str, name: str) -> Part:
    """name: in transformers' configs"""
    op, arguments = activations.op_of(activations.NAMES[name], gated=False)
    return Part(path, op, arguments=arguments)


def patch_embed(path: str, config: Any, hidden: int, bias: bool) -> Part:
    patch = config.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        "weight": (hidden, config.in_channels, config.temporal_patch_size, patch, patch)
    }
    return Part(path, "linear", {**shapes, "bias": (hidden,)} if bias else shapes)


def blocks(
    path: str, config: Any, hidden: int, inner: int, mlp: tuple[str, str, str] = ("fc1", "act", "fc2"),
    gated: bool = False,
) -> Iterable[Part]:  # fmt: skip
    """The layers of a tower. inner: channels within their MLPs, whose modules are `mlp`.

    gated: with RMS norms and gated MLPs, whose modules are Llama's
    """
    norm = rms_norm if gated else layer_norm
    for i in range(config.depth):
        at, sizes = f"{path}.{i}", {"num_heads": config.num_heads, "head_size": hidden // config.num_heads}
        yield norm(f"{at}.norm1", hidden)
        yield linear(f"{at}.attn.qkv", 3 * hidden, hidden, "heads")
        yield Part(
            f"{at}.attn", "rotary_emb", arguments={"head_size": sizes["head_size"], "is_neox_style": True}
        )
        yield Part(f"{at}.attn", "attention_dense", layout="heads", arguments=sizes)
        yield linear(f"{at}.attn.proj", hidden, hidden, "rows")
        yield norm(f"{at}.norm2", hidden)
        if gated:
            op, arguments = activations.op_of(activations.NAMES[config.hidden_act], gated=True)
            yield linear(f"{at}.mlp.gate_up_proj", 2 * inner, hidden, "columns")
            yield Part(f"{at}.mlp.act_fn", op, arguments=arguments)
            yield linear(f"{at}.mlp.down_proj", hidden, inner, "rows")
            continue
        yield linear(f"{at}.mlp.{mlp[0]}", inner, hidden, "columns")
        yield activation(f"{at}.mlp.{mlp[1]}", config.hidden_act)
        yield linear(f"{at}.mlp.{mlp[2]}", hidden, inner, "rows")
