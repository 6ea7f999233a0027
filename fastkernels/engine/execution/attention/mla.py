"""Multi-head latent attention with our ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from fastkernels.core.dispatch import Op, Provider
from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.engine.execution.attention.base import AttentionBackend, CannotCapture, metadata_of
from fastkernels.engine.execution.attention.ops import choose
from fastkernels.engine.steps.input_batch import Inputs
from fastkernels.engine.steps.step import StepInput
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.latent_attention.expansion import Expansion, Rest
from fastkernels.overrides.latent_attention.mla_attention import LatentAttention
from fastkernels.overrides.latent_attention.mla_decode import mla_decode
from fastkernels.overrides.latent_attention.mla_prefill import mla_prefill
from fastkernels.overrides.latent_attention.mla_sparse import mla_sparse

MOST_EXPANDED = 1 << 29  # numbers in expanded keys and values of a step: 1 GiB in 16 bits
# A graph saves a layer about 0.15 ms of launches. That is as long as the work of so many multiply-adds, half of them
# masked, and one decode of so many keys, which has no splits there.
MOST_ABSORBED = 1 << 34
LONGEST_DECODE = 4096


class MlaBackend(AttentionBackend):
    """Uses mla_decode for rows with one query. The rest attend to expanded keys if that is less work, else to latents.

    provider  'triton' or 'reference'; None: the first available provider of each op that supports the layers
    Raises ValueError for an unsupported provider.
    """

    reads_lengths = True
    most_mixed = 1024  # outside graphs, more tokens hide their launches and expand their keys

    def __init__(
        self,
        provider: str | None,
        layers: Sequence[PagedAttention],
        device: torch.device,
        dtype: torch.dtype,
    ):
        layer = next(m for m in layers if isinstance(m, LatentAttention))  # the others are indexers
        self._wanted, self._layer, self._device = provider, layer, device
        assert layer.kv_cache is not None
        self._block_size = layer.kv_cache[0].shape[1]
        q = torch.empty(1, layer.num_heads, layer.head_size, dtype=dtype, device=device)
        one = torch.ones(2, dtype=torch.int32, device=device)
        args = [q, layer.kv_cache[0], one[:1], one[:1].view(1, 1), 1, layer.scale, layer.kv_lora_rank]
        self._decode = choose(mla_decode, provider, [args], device)
        self._prefill = choose(mla_prefill, provider, [[*args[:2], one, *args[2:4], 1, *args[4:]]], device)
        self.name = self._decode.name

    def plan(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        padded = inputs.input_ids.shape[0] > int(inputs.host_query_lens.sum())
        return metadata_of(self, inputs, block_table, self._expansion(inputs, block_table), padded)

    def _expansion(self, inputs: Inputs, block_table: torch.Tensor) -> Expansion | None:
        """The plan for expanded keys of this step's prompts; None where latents are less work, or on request.

        In sparse attention, queries that see up to `topk` keys attend to all of them, whatever the indexer picks.
        """
        n, layer = inputs.num_decodes, self._layer
        queries, lens = inputs.host_query_lens[n:].astype(np.int64), inputs.host_seq_lens[n:].astype(np.int64)
        if self._wanted is not None or len(lens) == 0 or mla_prefill.candidate is not None:
            return None
        topk = layer.topk or 0
        sparse = 0 < topk < inputs.max_seqlen_k
        if sparse and mla_sparse.candidate is not None:
            return None
        if sparse:
            before = lens - queries
            queries = np.clip(topk - before, 0, queries)
            lens = np.where(queries > 0, before + queries, 0)
        counts = -(-lens // self._block_size)
        total = int(counts.sum())
        if total == 0 or not self._is_worth(queries, lens, total * self._block_size):
            return None
        # On the device, as a copy from the host would wait for it
        cu, keys, rest = inputs.cu_seqlens_q[n:], inputs.seq_lens[n:], None
        if sparse:
            of_all, ends = inputs.cu_seqlens_q.diff(), inputs.seq_lens
            dense = torch.minimum((topk - ends + of_all).clamp(min=0), of_all)
            dense[:n] = 0
            rest = _rest(inputs, of_all - dense, int(inputs.host_query_lens.sum() - queries.sum()), queries)
            dense, keys = dense[n:], torch.where(dense > 0, ends - of_all + dense, 0)[n:]
            cu = torch.cat((torch.stack((cu[:-1], cu[:-1] + dense), 1).flatten(), cu[-1:]))
        there = (keys + (self._block_size - 1)) // self._block_size
        starts = there.cumsum(0) - there
        row = torch.repeat_interleave(there, output_size=total)
        column = torch.arange(total, device=block_table.device) - starts[row]
        starts = (starts * self._block_size).int()
        if sparse:  # each sequence's other queries have no keys here
            starts, keys = (torch.stack((t, torch.zeros_like(t)), 1).flatten() for t in (starts, keys))
        blocks, most = block_table[n:].long()[row, column], inputs.max_seqlen_q
        return Expansion(blocks, cu.int(), starts, keys.int(), most, rest)

    def _is_worth(self, queries: np.ndarray, lens: np.ndarray, tokens: int) -> bool:
        """Whether expanding so many tokens is less work than attending to latents, and fits into memory."""
        layer = self._layer
        size = layer.qk_nope_head_dim + layer.head_size - layer.kv_lora_rank
        channels = layer.qk_nope_head_dim + layer.v_head_dim
        # Operations for each head: less for a query and a key, more for a key
        less = layer.head_size + layer.kv_lora_rank - size - layer.v_head_dim
        more = layer.kv_lora_rank * channels
        return (
            less * int((queries * lens).sum()) >= more * tokens
            and tokens * layer.num_heads * channels <= MOST_EXPANDED
        )

    def plan_capture(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        if self.name == "reference":
            raise CannotCapture("reference: its memory grows with the longest possible context")
        if not inputs.decode_only and self._prefill.name == "reference":
            raise CannotCapture("reference: it reads the lengths of prompts on the host")
        if not inputs.decode_only and self._layer.topk is not None:
            raise CannotCapture("sparse attention: scores of prompts are computed in parts, by their lengths")
        return metadata_of(self, inputs, block_table)

    def takes_apart(self, step: StepInput, hides_launches: bool) -> bool:
        """Graphs attend to latents, decodes in the kernel of prompts; outside them, long prompts expand their keys."""
        n, layer = step.num_decodes, self._layer
        pairs = int((step.query_lens[n:].astype(np.int64) * step.seq_lens[n:]).sum())
        work = pairs * layer.num_heads * (layer.head_size + layer.kv_lora_rank)
        return (
            hides_launches or work > MOST_ABSORBED or int(step.seq_lens[:n].max(initial=0)) > LONGEST_DECODE
        )

    def forward(
        self,
        layer: LatentAttention,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """q: absorbed queries [T, H, rank + rope]. The layer has stored its latents, which have no k and v."""
        decode, prefill = self._call(mla_decode, self._decode), self._call(mla_prefill, self._prefill)
        return layer.attend(q, metadata, decode, prefill)

    def function(self, op: Op) -> Callable[..., torch.Tensor]:
        found = [p for p, absent in op.order(self._device.type) if p.name == self._wanted and absent is None]
        return self._call(op, found[0]) if found else op

    def _call(self, op: Op, provider: Provider) -> Callable[..., torch.Tensor]:
        """The function to call: a candidate, else the user's provider or the op's own choice."""
        if op.candidate is not None or self._wanted is None:
            return op
        op.calls += 1
        return provider.fn


def _rest(inputs: Inputs, counts: torch.Tensor, total: int, dense: np.ndarray) -> Rest:
    """The rows that `dense` queries of each prompt leave: the last ones, `counts` of each sequence, `total` in all."""
    ends = counts.cumsum(0)
    row = torch.repeat_interleave(counts, output_size=total)
    rows = inputs.cu_seqlens_q[1:][row] - ends[row] + torch.arange(total, device=counts.device)
    most = int((inputs.host_query_lens[inputs.num_decodes :] - dense).max())
    return Rest(rows, torch.cat((ends.new_zeros(1), ends)).int(), max(most, 1))
