"""Layers that normalize their blocks' outputs before the sum: one launch for each sum and the norms around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import Op
from fastkernels.models.common.descriptions.description import Decoder, Layer, Norm
from fastkernels.overrides.norm.gemma_rms_norm import gemma_rms_norm
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.sandwich_norm import sandwich_norm

KINDS = {"rms": (rms_norm, 0.0), "gemma": (gemma_rms_norm, 1.0)}  # the norms' op, and what it adds to weights


class Sandwich:
    """The decoder layers of a model, from the embeddings to the final norm."""

    def __init__(self, norm: Norm) -> None:
        self.eps, (self.op, self.offset) = norm.eps, KINDS[norm.kind]

    @property
    def apart(self) -> tuple[Op, ...]:
        """The ops that it replaces."""
        return (self.op,)

    def run(
        self,
        layers: Any,
        norm: nn.Module,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        inputs: torch.Tensor | None,
        enter: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """hidden [T, H], which is overwritten, to the norm of the last layer's result. inputs: [T, layers, size].

        enter: called with what enters each layer
        """
        befores = [layer.norm_at(0) for layer in layers]
        x = hidden if befores[0] is None else befores[0](hidden)
        for i, layer in enumerate(layers):
            if enter is not None:
                enter(i, hidden)
            after = befores[i + 1] if i + 1 < len(layers) else norm
            x = self._layer(layer, positions, x, hidden, after, None if inputs is None else inputs[:, i])
        return x

    def _layer(
        self, layer: Any, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, after: Any,
        layer_input: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the input of what follows the layer. after: the norm there, or None."""
        attend, mlp = (getattr(layer, name) for name in layer.parts)
        _, after_attention, before_mlp, after_mlp = (layer.norm_at(i) for i in range(4))
        moe, last = layer.moe, after_mlp
        branch: tuple[Any, ...] = ()
        out, before_sum = attend(positions, x), after_attention
        if layer.inner is not None:
            (y,) = self._add(out, residual, after_attention, layer.norm_at(4), None)
            out, before_sum = getattr(layer, layer.inner)(positions, y), layer.norm_at(5)
        y, *routed = self._add(out, residual, before_sum, before_mlp, moe)
        done = mlp(y)
        if moe is not None:
            last, branch = moe.after_mlp, (moe.compute(*routed), moe.after.weight, after_mlp.weight)
        if layer.layer_input is not None:
            sandwich_norm(
                done, residual, last.weight, self.eps, self.offset, None, None, None, 1.0, None, *branch
            )
            done, last, branch = layer.layer_input.project(residual, layer_input), layer.layer_input.norm, ()
        weight = None if after is None else after.weight
        out = sandwich_norm(
            done,
            residual,
            last.weight,
            self.eps,
            self.offset,
            weight,
            None,
            None,
            1.0,
            layer.layer_scalar,
            *branch,
        )
        return residual if after is None else out[0]

    def _add(
        self, out: torch.Tensor, residual: torch.Tensor, norm: Any, before_mlp: Any, moe: Any
    ) -> tuple[torch.Tensor, ...]:
        """Add the norm of the attention's output. Return the inputs of the MLP, and of a router and its experts."""
        nexts = [None if before_mlp is None else before_mlp.weight]
        if moe is not None:
            nexts += [moe.router.norm.weight, moe.before.weight, moe.router.factor]
        outs = sandwich_norm(out, residual, norm.weight, self.eps, self.offset, *nexts)
        return outs.unbind() if len(outs) else (residual,)


def sandwich_of(d: Decoder) -> Sandwich | None:
    """For a description whose layers are like that, with one kind of norm; None for others."""
    norms = {d.norm, *([] if d.layer_input is None else [d.layer_input.norm])}
    for layer in d.layers:
        if not _suits(layer):
            return None
        every = layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp
        norms |= {norm for norm in every if norm is not None}
        if layer.inner is not None:
            norms |= {norm for norm in (layer.inner.before, layer.inner.after) if norm is not None}
        norms |= set() if layer.experts is None else {layer.experts.norm}
    return Sandwich(d.norm) if len(norms) == 1 and d.norm.kind in KINDS else None


def _suits(layer: Layer) -> bool:
    both = layer.after_attention is not None and layer.after_mlp is not None
    alone = layer.experts is None or layer.before_mlp is not None
    inner = layer.inner is None or layer.inner.after is not None
    return both and alone and inner and not layer.parallel and layer.multiplier == 1.0
