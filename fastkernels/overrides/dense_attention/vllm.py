"""Drop-in attention for the vision and audio towers of vLLM's models: one pass over all keys, without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.attention_dense import attention_dense


def _scaled_lengths(module: Any) -> str | None:
    """Why the starts of sequences that the host passes are not counted in tokens, or the tensors are FP8."""
    if getattr(module, "fp8_enabled", False):
        return "mm_encoder_attn_dtype is 'fp8'"
    name = getattr(getattr(module, "attn_backend", None), "name", None)
    return f"its backend {name} takes lengths in elements, not in tokens" if name == "FLASHINFER" else None


class VllmMMEncoderAttention(nn.Module):
    """MMEncoderAttention: query, key and value [B, S, heads * head_size], or [B, S, heads, head_size], to the same.

    With cu_seqlens [sequences + 1], the tokens of all B rows are concatenated sequences, as in the host's own kernels.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        self.num_queries_per_kv = num_heads // self.num_kv_heads
        self.layer_name = prefix

    supports = staticmethod(_scaled_lengths)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _attended(self, query, key, value, cu_seqlens, max_seqlen)

    forward_native = forward


def _attended(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: torch.Tensor | None = None,
) -> torch.Tensor:
    """The forward of VllmMMEncoderAttention, also of one sequence [S, heads * head_size]."""
    if query.dim() == 2:
        return _attended(module, query[None], key[None], value[None], cu_seqlens, max_seqlen)[0]
    q = query.view(*query.shape[:2], module.num_heads, module.head_size)
    k, v = (t.view(*t.shape[:2], module.num_kv_heads, module.head_size) for t in (key, value))
    if cu_seqlens is None:
        return attention_dense(q, k, v, module.scale).view(query.shape)
    starts, longest = cu_seqlens.to(torch.int32), _longest(cu_seqlens, max_seqlen)
    rows = (t.flatten(0, 1)[None] for t in (q, k, v))
    return attention_dense(*rows, module.scale, None, starts, starts, longest, longest).view(query.shape)


def _longest(cu_seqlens: torch.Tensor, max_seqlen: torch.Tensor | int | None) -> int:
    """The longest sequence. The host gives none, or 0, where its own kernel needs none."""
    given = 0 if max_seqlen is None else int(max_seqlen)
    return given or int(cu_seqlens.diff().max())


class VllmWhisperEncoderAttention(VllmMMEncoderAttention):
    """WhisperEncoderAttention: as VllmMMEncoderAttention, also of one sequence [S, heads * head_size]."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _attended(self, query, key, value, cu_seqlens, max_seqlen)


class VllmWhisperEncoderAttention_0_26(VllmMMEncoderAttention):
    """WhisperEncoderAttention before 0.32: equal sequences, or one."""

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return _attended(self, query, key, value)


_TOWER = "Off by default: not measured in vLLM's towers."
_WHISPER = "vllm.model_executor.models.whisper:WhisperEncoderAttention"


def _target(path: str, cls: str, versions: str = "") -> Target:
    return Target("vllm", path, cls, "leaf", versions, default=False, note=_TOWER)


TARGETS = {
    "attention_dense": (
        _target(
            "vllm.model_executor.layers.attention.mm_encoder_attention:MMEncoderAttention",
            "VllmMMEncoderAttention",
        ),
        _target(_WHISPER, "VllmWhisperEncoderAttention_0_26", "<0.32"),
        _target(_WHISPER, "VllmWhisperEncoderAttention", ">=0.32"),
    ),
}
