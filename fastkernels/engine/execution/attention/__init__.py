"""Attention behind one interface (base.py); EngineConfig.attention_backend picks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.engine.execution.attention.base import (
    AttentionBackend,
    CannotCapture,
    NoAttention,
    with_groups,
)
from fastkernels.engine.execution.attention.mla import MlaBackend
from fastkernels.engine.execution.attention.ops import OpsBackend
from fastkernels.overrides.latent_attention.mla_attention import LatentAttention

__all__ = ["AttentionBackend", "CannotCapture", "make_backend", "with_groups"]


def make_backend(
    name: str | None, layers: Sequence[Any], device: torch.device, dtype: torch.dtype, trees: bool = False
) -> AttentionBackend:
    """The backend for these PagedAttention layers with bound KV cache. Raises ValueError if it is unsupported.

    trees: of drafts, which need layers that see all tokens
    """
    if not layers:
        return NoAttention()
    if trees:
        _check_trees(name, layers)
    if any(isinstance(layer, LatentAttention) for layer in layers):
        return MlaBackend(name, layers, device, dtype)
    if name == "flashinfer":
        from fastkernels.engine.execution.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(layers, device, dtype)
    return OpsBackend(name, layers, device, dtype, trees)


def _check_trees(name: str | None, layers: Sequence[Any]) -> None:
    what = "speculative_config: speculative_token_tree is not supported"
    if name == "flashinfer":
        raise ValueError(f"{what} with attention_backend 'flashinfer', which has no tree masks: use 'triton'")
    for layer in layers:
        if isinstance(layer, LatentAttention):
            raise ValueError(f"{what} for latent attention; leave it out, and drafts are in a chain")
        if layer.window_left >= 0 or layer.alibi_slopes is not None:
            kind = "a sliding window" if layer.window_left >= 0 else "ALiBi"
            raise ValueError(f"{what} for attention with {kind}; leave it out, and drafts are in a chain")
