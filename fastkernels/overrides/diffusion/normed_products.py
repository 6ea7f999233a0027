"""Queries, keys and values of FLUX's attention, the first two normed and rotated in the kernel of their products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.core.dispatch import functional
from fastkernels.overrides.diffusion.qk_norm_rope import reference
from fastkernels.overrides.diffusion.qk_norm_rope_pair import _is_plain
from fastkernels.overrides.kit.modules import FEW, compute_products, plain_linear
from fastkernels.overrides.linear.tiled_linear_cuda import (
    NORMED_HEAD,
    linears_normed,
    runs_tiled,
    supports_tiled,
)

LEAST = 1024  # tokens of an image
Layers = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], Sequence[torch.Tensor]]


def _supported(x: torch.Tensor, layers: Layers, *tables: torch.Tensor) -> bool:
    weights, biases, norms = layers
    products = zip(weights, biases, strict=True)
    aligned = all(t.is_contiguous() and not t.data_ptr() % 16 for t in (*norms, *tables))
    return x.is_cuda and aligned and all(supports_tiled(x, *each) is None for each in products)


def _linear_norm_rope(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], norms: list[torch.Tensor],
    text: torch.Tensor | None, text_weights: list[torch.Tensor], text_biases: list[torch.Tensor | None],
    text_norms: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, eps: float,
) -> torch.Tensor:  # fmt: skip
    parts: list[tuple[torch.Tensor, Layers]] = [(x, (weights, biases, norms))]
    if text is not None:
        parts.insert(0, (text, (text_weights, text_biases, text_norms)))
    if not all(_supported(part, layers, cos, sin) for part, layers in parts):
        return _in_steps(parts, cos, sin, eps)
    out = _like(x, weights, biases, norms, text)
    if text is None:
        linears_normed(x, weights, biases, norms, cos, sin, eps, out.flatten(1, 2))
        return out
    for i in range(len(x)):
        start = 0
        for part, layers in parts:
            rows = slice(start, start + part.shape[1])
            linears_normed(part[i], *layers, cos[rows], sin[rows], eps, out[:, i, rows])
            start = rows.stop
    return out


def _in_steps(
    parts: list[tuple[torch.Tensor, Layers]], cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    found, start = [], 0
    for part, (weights, biases, norms) in parts:
        rows = slice(start, start + part.shape[1])
        q, k, v = compute_products(part, list(weights), list(biases))
        both = (
            reference(t.unflatten(-1, (-1, NORMED_HEAD)), norm, cos[rows], sin[rows], eps).flatten(2)
            for t, norm in zip((q, k), norms, strict=True)
        )
        found.append(torch.stack((*both, v)))
        start = rows.stop
    return torch.cat(found, dim=2)


def _like(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Any, norms: Any, text: Any, *_: Any
) -> torch.Tensor:
    tokens = x.shape[1] + (0 if text is None else text.shape[1])
    return x.new_empty((3, len(x), tokens, weights[0].shape[0]))


_op = functional(
    "linear_norm_rope(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] norms, Tensor? text,"
    " Tensor[] text_weights, Tensor?[] text_biases, Tensor[] text_norms, Tensor cos, Tensor sin, float eps) -> Tensor",
    _linear_norm_rope,
    _like,
)


def normed_products(
    attn: Any, x: torch.Tensor, text: torch.Tensor | None, rotary: tuple[torch.Tensor, torch.Tensor] | None
) -> Sequence[torch.Tensor] | None:
    """Queries, keys and values [B, St + S, H, head_dim], ready for attention; None where they are not one kernel's.

    x: [B, S, K]; text: [B, St, K] or None, in front of x; rotary: cosines and sines [St + S, head_dim].
    """
    if (
        not torch.compiler.is_compiling()
        or rotary is None
        or attn.fused_projections
        or attn.head_dim != NORMED_HEAD
    ):
        return None
    if (
        x.shape[1] < LEAST
        or any(t.dtype != torch.float32 for t in rotary)
        or (text is not None and len(x) > FEW)
    ):
        return None
    parts = [_layers(attn, x, "to_{}", "norm_{}")]
    if text is not None:
        parts.append(_layers(attn, text, "add_{}_proj", "norm_added_{}"))
    eps = attn.norm_q.eps
    if None in parts or any(norm.eps != eps for part in parts for norm in part[1]):  # type: ignore[index]
        return None
    given: list[Any] = []
    for part in parts:
        linears, norms = part  # type: ignore[misc]
        given += [[m.weight for m in linears], [m.bias for m in linears], [m.weight for m in norms]]
    of_text = given[3:] or [[], [], []]
    cos, sin = (t.to(x.device) for t in rotary)
    found = _op(x, *given[:3], text, *of_text, cos, sin, eps)
    return found.unflatten(-1, (-1, NORMED_HEAD)).unbind()


def _layers(attn: Any, x: torch.Tensor, projection: str, norm: str) -> tuple[list[Any], list[Any]] | None:
    linears, norms = (
        [getattr(attn, name.format(part)) for part in which]
        for name, which in ((projection, "qkv"), (norm, "qk"))
    )
    plain = all(plain_linear(m, x) and runs_tiled(m, x) for m in linears)
    alike = (
        plain and len({m.weight.shape for m in linears}) == 1 and linears[0].out_features % NORMED_HEAD == 0
    )
    normed = all(
        _is_plain(n, x) and n.weight is not None and n.normalized_shape == (NORMED_HEAD,) for n in norms
    )
    return (linears, norms) if alike and normed else None
