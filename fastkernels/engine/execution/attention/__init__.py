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
    name: str | None, layers: Sequence[Any], device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """The backend for these PagedAttention layers with bound KV cache. Raises ValueError if it is unsupported."""
    if not layers:
        return NoAttention()
    if any(isinstance(layer, LatentAttention) for layer in layers):
        return MlaBackend(name, layers, device, dtype)
    if name == "flashinfer":
        from fastkernels.engine.execution.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(layers, device, dtype)
    return OpsBackend(name, layers, device, dtype)
