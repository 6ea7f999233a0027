"""Arguments that build any class of a rotary embedding, of a host or of ours."""

from __future__ import annotations

import inspect
from typing import Any

import torch

_OPTIONS: dict[str, Any] = {
    "head_size": 32, "rotary_dim": 24, "max_position_embeddings": 64, "base": 10000.0, "is_neox_style": True,
    "scaling_factor": 4.0, "scaling_factors": [2.0, 3.0], "scaling_alpha": 4.0, "max_trained_positions": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "orig_max_position": 32, "mrope_section": [6, 4, 2],
    "beta_fast": 4, "mscale": 0.7, "mscale_all_dim": 0.9, "attn_factor": 1.5, "extrapolation_factor": 0.9,
    "original_max_position_embeddings": 16, "short_factor": [1.25] * 12, "long_factor": [2.0 + j for j in range(12)],
}  # fmt: skip


def rope_options(cls: type, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    """The constructor's arguments; scaled, so that no table is that of plain rotary embeddings."""
    every = {**_OPTIONS, "dtype": dtype, **changes}
    return {name: every[name] for name in inspect.signature(cls).parameters if name in every}


def rope_inputs(cls: type, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """positions [7] and query and key, by head if the class takes that; x, cosines and sines if it has no table."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(7, heads, 32, generator=generator).to(dtype) for heads in (3, 1))
    if "enforce_enable" in inspect.signature(cls).parameters:
        return [query, *torch.rand(2, 7, 16, generator=generator).to(dtype)]
    if "long_factor" in inspect.signature(cls).parameters:  # the hosts' code takes no heads
        query, key = query.flatten(1), key.flatten(1)
    return [torch.randint(64, (7,), generator=generator), query, key]
