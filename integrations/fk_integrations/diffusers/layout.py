"""Images keep their channels last behind the transformers of a patched UNet, as the convolutions around them prefer it.

The host's Transformer2DModel copies its result so that channels come first, and the residual blocks, norms and
projections behind it copy images back.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fk_integrations.core.journal import Journal

_NAME = "_get_output_for_continuous_inputs"
_kept: WeakSet[nn.Module] = WeakSet()  # transformers of patched models


def keep_channels_last(models: Iterable[nn.Module], journal: Journal) -> None:
    """Leave out the copy in these models until the journal is undone; all others stay with the host's code."""
    host: Any = importlib.import_module("diffusers.models.transformers.transformer_2d").Transformer2DModel
    new = {m for model in models for m in model.modules() if isinstance(m, host)}.difference(_kept)
    if not new or _NAME not in vars(host):
        return

    def back() -> None:
        _kept.difference_update(new)
        ours = vars(host)[_NAME]
        if not _kept and hasattr(ours, "replaced"):
            setattr(host, _NAME, ours.replaced)

    journal.add(back)
    if not _kept:
        _replace(host)
    _kept.update(new)


def _replace(host: Any) -> None:
    theirs = vars(host)[_NAME]

    @wraps(theirs)
    def ours(
        self: Any, hidden_states: Any, residual: Any, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Any:
        last = residual.is_contiguous(memory_format=torch.channels_last) and not residual.is_contiguous()
        if torch.compiler.is_compiling() or not last or self not in _kept:
            return theirs(self, hidden_states, residual, batch_size, height, width, inner_dim)
        image = (batch_size, height, width, inner_dim)
        if self.use_linear_projection:
            return self.proj_out(hidden_states).reshape(image).permute(0, 3, 1, 2) + residual
        return self.proj_out(hidden_states.reshape(image).permute(0, 3, 1, 2)) + residual

    ours.replaced = theirs  # type: ignore[attr-defined]
    setattr(host, _NAME, ours)
