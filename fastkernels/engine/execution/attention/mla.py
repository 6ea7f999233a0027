"""Multi-head latent attention with our ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastkernels.core.dispatch import Op, Provider
from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.engine.execution.attention.base import AttentionBackend, CannotCapture, metadata_of
from fastkernels.engine.execution.attention.ops import choose
from fastkernels.engine.execution.input_batch import Inputs
from fastkernels.overrides.attention.mla_attention import LatentAttention
from fastkernels.overrides.attention.mla_decode import mla_decode
from fastkernels.overrides.attention.mla_prefill import mla_prefill


class MlaBackend(AttentionBackend):
    """Uses mla_decode for rows with one query and mla_prefill for the rest.

    provider  'triton' or 'reference'; None: the first available provider of each op that supports the layers
    Raises ValueError for an unsupported provider.
    """

    def __init__(
        self,
        provider: str | None,
        layers: Sequence[LatentAttention],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._wanted, layer = provider, layers[0]
        assert layer.kv_cache is not None
        q = torch.empty(1, layer.num_heads, layer.head_size, dtype=dtype, device=device)
        one = torch.ones(2, dtype=torch.int32, device=device)
        args = [q, layer.kv_cache[0], one[:1], one[:1].view(1, 1), 1, layer.scale, layer.kv_lora_rank]
        self._decode = choose(mla_decode, provider, [args], device)
        self._prefill = choose(mla_prefill, provider, [[*args[:2], one, *args[2:4], 1, *args[4:]]], device)
        self.name = self._decode.name

    def plan(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        return metadata_of(self, inputs, block_table)

    def plan_capture(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        if self.name == "reference":
            raise CannotCapture("reference: its memory grows with the longest possible context")
        if not inputs.decode_only:
            raise CannotCapture(
                f"{self.name}: rows with one query run in a separate kernel, and a graph would fix their number"
            )
        return metadata_of(self, inputs, block_table)

    def forward(
        self,
        layer: LatentAttention,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """q: absorbed queries [T, H, rank + rope]; k: latents [T, rank]; v: rotary keys [T, rope]."""
        if k is not None and v is not None:
            layer.store(k, v, metadata)
        decode, prefill = self._call(mla_decode, self._decode), self._call(mla_prefill, self._prefill)
        return layer.attend(q, metadata, decode, prefill)

    def _call(self, op: Op, provider: Provider) -> Callable[..., torch.Tensor]:
        """The function to call: a candidate, else the user's provider or the op's own choice."""
        if op.candidate is not None or self._wanted is None:
            return op
        op.calls += 1
        return provider.fn
