"""The modulated norm of two sequences in a row, text and image, which are not concatenated for it."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.overrides.diffusion.ada_layer_norm import ada_layer_norm
from fastkernels.overrides.diffusion.diffusers import _unsupported
from fastkernels.overrides.diffusion.modulation import modulation
from fastkernels.overrides.linear.modules import changed

Opened = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]


def modulated_pair(norm: Any, text: torch.Tensor, image: torch.Tensor, emb: torch.Tensor) -> Opened:
    """norm(torch.cat((text, image), 1), emb=emb): its result x and gate, as (front, residual, x, gate).

    norm             diffusers' AdaLayerNormZeroSingle, ours or the host's
    front, residual  text and image; None and the concatenation if that was needed
    """
    if _opens(norm) and text.dtype == image.dtype:
        shift, scale, gate = modulation(norm.linear, norm.silu(emb)).chunk(3, dim=1)
        if _unsupported(norm.norm, image, scale) is None:
            affine = norm.norm.weight, norm.norm.bias, norm.norm.eps
            return text, image, ada_layer_norm(image, scale, shift, *affine, text), gate
    both = torch.cat((text, image), dim=1)
    x, gate = norm(both, emb=emb)
    return None, both, x, gate


def _opens(norm: Any) -> bool:
    """Whether the norm's own code runs, and nothing around it."""
    cls: Any = type(norm)
    theirs = cls.__mro__[1] if hasattr(cls, "fastkernels") else cls
    return theirs.__name__.endswith("AdaLayerNormZeroSingle") and not changed(norm)
