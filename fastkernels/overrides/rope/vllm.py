"""vLLM's classes of rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.rope.rope_tables import Llama3, RopeModule, rotate
from fastkernels.overrides.rope.rotary_emb import rotary_emb


class VllmRotaryEmbedding(RopeModule):
    """vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding: the cache is kept in `dtype`.

    forward: positions [T]; query, key as in `reference`, key may be None. Returns (query, key), changed in place; new
    tensors under torch.compile.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype, init_cache: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        if init_cache:
            self._make_cache(dtype)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        how = (self.head_size, self.cos_sin_cache, self.is_neox_style, True, False)
        return rotate(rotary_emb, positions, query, key, *how)


class VllmLlama3RotaryEmbedding(Llama3, VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.llama3_rope.Llama3RotaryEmbedding; see VllmRotaryEmbedding."""


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> VllmRotaryEmbedding:
    """The module for a Hugging Face config's rope_parameters (rope_theta, rope_type, partial_rotary_factor, ...).

    Raises ValueError for a rope_type other than 'default' and 'llama3', or a parameter that is missing.
    """
    p = dict(rope_parameters or {})
    kind = p.get("rope_type", p.get("type", "default"))
    rotary_dim = int(head_size * p.get("partial_rotary_factor", 1.0))
    args = (head_size, rotary_dim, max_position, float(p.get("rope_theta", 10000.0)), is_neox_style)
    dtype = dtype or torch.get_default_dtype()
    if kind == "default":
        return VllmRotaryEmbedding(*args, dtype)
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported; known: default, llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [n for n in names if n not in p]
    if missing:
        raise ValueError(f"rope_type 'llama3' needs {', '.join(missing)} in rope_parameters")
    return VllmLlama3RotaryEmbedding(*args, dtype, *(p[n] for n in names))


_ROPE = "vllm.model_executor.layers.rotary_embedding."

TARGETS = {
    "rotary_emb": (
        Target("vllm", _ROPE + "base:RotaryEmbedding", "VllmRotaryEmbedding", "leaf"),
        Target("vllm", _ROPE + "llama3_rope:Llama3RotaryEmbedding", "VllmLlama3RotaryEmbedding", "leaf"),
    ),
}
