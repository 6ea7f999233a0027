"""Drop-in attention for the vision towers of SGLang's models: one pass over all keys, without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.attention_dense import attention_dense


class SGLangVisionSdpaAttention(nn.Module):
    """VisionSdpaAttention: q [bsz * S, heads, D], k and v [bsz * S, KV heads, D] to q's shape.

    With flatten_batch and cu_seqlens [sequences + 1], tokens attend within these sequences.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        dropout: float = 0.0,
        flatten_batch: bool = False,
        softmax_in_single_precision: bool = False,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.head_size, self.num_heads, self.num_kv_heads = head_dim, num_heads, num_kv_heads
        self.flatten_batch, self.dropout = flatten_batch, dropout
        self.softmax_in_single_precision = softmax_in_single_precision
        self.scale = head_dim**-0.5 if softmax_scale is None else softmax_scale

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if module.softmax_in_single_precision:
            return "softmax_in_single_precision rounds the scores first"
        return f"dropout {module.dropout}" if module.dropout else None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bsz: int,
        cu_seqlens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attention_mask is not None or (cu_seqlens is not None and not self.flatten_batch):
            reason = "a mask" if attention_mask is not None else "padded sequences"
            return _theirs(self, reason)(q, k, v, bsz, cu_seqlens, attention_mask, **kwargs)
        if cu_seqlens is None:
            rows = (t.unflatten(0, (bsz, -1)) for t in (q, k, v))
            return attention_dense(*rows, self.scale).flatten(0, 1)
        starts = cu_seqlens.to(device=q.device, dtype=torch.int32)
        longest = int(kwargs.get("max_seqlen") or cu_seqlens.diff().max())
        packed = (t[None] for t in (q, k, v))
        return attention_dense(*packed, self.scale, None, starts, starts, longest, longest)[0]


def _theirs(module: Any, reason: str) -> Any:
    """The host's forward of a live module, for a call that ours does not support."""
    attention_dense.note(reason)
    host: Any = type(module).__mro__[1]
    return host.forward.__get__(module)


TARGETS = {
    "attention_dense": (
        Target(
            "sglang", "sglang.srt.layers.attention.vision:VisionSdpaAttention", "SGLangVisionSdpaAttention", "leaf",
            default=False, note="Off by default: not measured in SGLang's towers.",
        ),
    ),
}  # fmt: skip
