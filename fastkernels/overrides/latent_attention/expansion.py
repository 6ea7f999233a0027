"""The plan of a step of multi-head latent attention whose prompts attend to expanded keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fastkernels.core.forward_context import AttentionMetadata


@dataclass(frozen=True)
class Rest:
    """The step's queries that attend to latents in sparse attention: decodes, and those past `topk` keys.

    rows           [R] int64, of the step's tokens
    cu_seqlens_q   [B + 1] int32, of these rows: the last ones of each sequence, or none
    max_seqlen_q   the most of a sequence
    """

    rows: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int

    def of(self, m: AttentionMetadata) -> AttentionMetadata:
        """The metadata of these rows, made from that of the whole step."""
        return replace(
            m, slot_mapping=m.slot_mapping[self.rows], cu_seqlens_q=self.cu_seqlens_q, max_seqlen_q=self.max_seqlen_q,
            plan=None, padded=False,
        )  # fmt: skip


@dataclass(frozen=True)
class Expansion:
    """Which keys are expanded, and the queries that attend to them, as mla_expanded takes them.

    blocks        [N] of the cache, sequence after sequence
    cu_seqlens_q  [S + 1] int32: sequences, or parts of them. Some have no keys: results of their queries come later
    starts        [S] int32: the first token of each one's keys among those blocks
    seq_lens      [S] int32
    max_seqlen_q  the most queries of one
    rest          None: decodes, which come first, attend to latents
    """

    blocks: torch.Tensor
    cu_seqlens_q: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    rest: Rest | None = None
