"""The residuals of timm's blocks, in code that runs as it is and in code that torch.compile traces."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.overrides.block.linear_residual import adds, linear_residual
from fastkernels.overrides.block.swiglu import fuses_swiglu, swiglu
from fastkernels.overrides.dense_attention.timm import before_projection, only_hosts
from fastkernels.overrides.diffusion.gated_residual import add_residual, apply_norm
from fastkernels.overrides.linear.modules import changed
from fastkernels.overrides.linear.timm import hidden
from fastkernels.overrides.linear.unlike import not_silu


def add_both(
    block: Any, x: torch.Tensor, scales: tuple[torch.Tensor | None, ...], between: tuple[tuple[Any, ...], ...],
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Add attention and MLP of a block to x [B, T, H]; scales, between: of both, as `add_residual` takes them.

    In code that torch.compile traces, each residual is the epilogue of the product before it, and a compiler fuses the
    rest. options: of attention.
    """
    if not torch.compiler.is_compiling():
        x, normed = add_residual(x, block.attn(block.norm1(x), **options), scales[0], between[0], block.norm2)
        return add_residual(x, block.mlp(normed), scales[1], between[1])[0]
    y = apply_norm(block.norm1, x)
    if _known(block.attn, _ATTENTION, between[0]) and adds(block.attn.proj, y, scales[0]):
        proj = block.attn.proj
        attended = before_projection(block.attn, y, **options)
        x = linear_residual(x, attended, proj.weight, proj.bias, scales[0])
        y = apply_norm(block.norm2, x)
    else:
        x = x + _through(block.attn(y, **options), scales[0], between[0])
        y = block.norm2(x)
    mlp, with_gate = block.mlp, _known(block.mlp, _GATED, between[1]) and _is_swiglu(block.mlp, y)
    if (with_gate or _known(mlp, _MLP, between[1])) and adds(mlp.fc2, y, scales[1]):
        before_fc2 = _gated(mlp, y) if with_gate else hidden(mlp, y)
        return linear_residual(x, before_fc2, mlp.fc2.weight, mlp.fc2.bias, scales[1])
    return x + _through(mlp(y), scales[1], between[1])


_ATTENTION, _MLP, _GATED = (
    tuple(prefix + name for name in names for prefix in ("", "Timm"))
    for names in (("Attention", "AttentionRope", "EvaAttention"), ("Mlp",), ("GluMlp", "SwiGLU"))
)


def _is_swiglu(mlp: Any, x: torch.Tensor) -> bool:
    """Whether one kernel computes what the last layer of a GluMlp or SwiGLU takes."""
    silu_first = not_silu(mlp, "act") is None and not getattr(mlp, "gate_last", False)
    return silu_first and fuses_swiglu(x, *_gate_and_up(mlp))


def _gate_and_up(mlp: Any) -> tuple[Any, ...]:
    return (mlp.fc1_g, mlp.fc1_x) if hasattr(mlp, "fc1_g") else (mlp.fc1,)


def _gated(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what the last layer of a GluMlp or SwiGLU, ours or the host's, takes."""
    return apply_norm(mlp.norm, mlp.drop1(swiglu(x, *_gate_and_up(mlp))))


def _known(layer: Any, names: tuple[str, ...], between: tuple[Any, ...]) -> bool:
    """Whether a layer, the host's or ours, has one of these classes' formulas, and its result is added as it is."""
    idle = not layer.training and not any(map(changed, (layer, *between)))
    return idle and type(layer).__name__ in names and only_hosts(layer) is None


def _through(y: torch.Tensor, scale: torch.Tensor | None, between: tuple[Any, ...]) -> torch.Tensor:
    y = y if scale is None else scale * y
    for module in between:
        y = module(y)
    return y
