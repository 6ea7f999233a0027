"""SGLang's classes of rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.rope.rope_tables import Llama3, RopeModule
from fastkernels.overrides.rope.rotary_emb import rotary_emb


class SGLangRotaryEmbedding_0_5_16(RopeModule):
    """sglang.srt.layers.rotary_embedding.base.RotaryEmbedding before 0.5.21: float32 cache on CUDA, else in `dtype`.

    forward: positions [T]; query, key as in `reference`. Returns (query, key), changed in place. With
    fused_set_kv_buffer_arg a live module uses the host's own kernel; standalone that is a ValueError.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        self._make_cache(torch.float32 if torch.cuda.is_available() else dtype)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not serve this module (ours or the host's), None if it does."""
        if getattr(module, "_force_native", False):
            return "rl_on_policy_target requires the host's native kernel"
        return None

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if fused_set_kv_buffer_arg is not None:
            host = getattr(self, f"forward_{query.device.type}", None)
            if host is None:
                raise ValueError(
                    "fused_set_kv_buffer_arg is not supported: store key and value with store_kvcache"
                )
            rotary_emb.note("fused_set_kv_buffer_arg: the host's own kernel stores key and value too")
            return host(positions, query, key, offsets, fused_set_kv_buffer_arg)
        if offsets is not None:
            positions = positions + offsets
        native = query.device.type == "cpu"  # there the host rounds after every operation
        rotary_emb(
            positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style, native, native
        )
        return query, key


class SGLangRotaryEmbedding(SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.base.RotaryEmbedding, with the first cached position; see its base."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        dtype: torch.dtype, position_start: int = 0,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        self.position_start = position_start
        self._make_cache(torch.float32 if torch.cuda.is_available() else dtype, position_start)


class SGLangLlama3RotaryEmbedding(Llama3, SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.rope_variant.Llama3RotaryEmbedding; see SGLangRotaryEmbedding_0_5_16."""


_BASE = "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding"
_LLAMA3 = "sglang.srt.layers.rotary_embedding.rope_variant:Llama3RotaryEmbedding"

TARGETS = {
    "rotary_emb": (
        Target("sglang", _BASE, "SGLangRotaryEmbedding_0_5_16", "leaf", "<0.5.21"),
        Target("sglang", _BASE, "SGLangRotaryEmbedding", "leaf", ">=0.5.21"),
        Target("sglang", _LLAMA3, "SGLangLlama3RotaryEmbedding", "leaf"),
    ),
}
