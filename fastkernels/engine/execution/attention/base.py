"""The interface between the runner and an attention implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastkernels.core.dispatch import Op
from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.engine.steps.input_batch import Inputs
from fastkernels.engine.steps.step import StepInput
from fastkernels.overrides.cache.store_kvcache import store_kvcache


class CannotCapture(Exception):
    """The backend cannot run this batch inside a CUDA graph, for the reason in the message."""


class AttentionBackend(ABC):
    """The attention of one runner. No method waits for the device.

    plan             for each eager step: make its metadata
    capture_buffers  once before graphs are captured: allocate static buffers
    plan_capture     for each graph: make the metadata that it is captured with
    plan_replay      for each step that runs as a graph: update the buffers of that metadata
    forward          for each layer: store keys and values, then attend
    """

    name: str
    most_mixed: int = 2048  # tokens of the largest mixed batch in a graph
    reads_lengths: bool = (
        False  # whether `plan` reads the rows' lengths on the host, which must be exact then
    )

    @abstractmethod
    def plan(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        """block_table: [B, max_blocks] int32 of the step's rows, in the first group of layers."""

    def capture_buffers(self, max_rows: int, max_blocks: int) -> None:  # noqa: B027
        """Graphs of up to max_rows rows with max_blocks blocks each will be captured."""

    @abstractmethod
    def plan_capture(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        """Metadata for static tensors; its host numbers bound those of all replays. Raises CannotCapture."""

    def plan_replay(  # noqa: B027
        self, metadata: AttentionMetadata, inputs: Inputs, block_tables: torch.Tensor
    ) -> None:
        """`inputs` are the static tensors of the graph with this metadata. block_tables: of all slots."""

    def takes_apart(self, step: StepInput, hides_launches: bool) -> bool:
        """Whether a mixed batch runs faster outside a graph. hides_launches: the GPU takes longer than the launches."""
        return False

    def function(self, op: Op) -> Callable[..., torch.Tensor]:
        """Return what layers call for an op that `forward` does not cover, which are those of sparse attention."""
        return op

    @abstractmethod
    def forward(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attention of a PagedAttention layer. q: [T, Hq, D]; k, v: [T, Hkv, D] to be stored. Returns [T, Hq, D]."""


class NoAttention(AttentionBackend):
    """The metadata of a model without attention."""

    name = "none"

    def plan(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        return metadata_of(self, inputs, block_table)

    def plan_capture(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        return metadata_of(self, inputs, block_table)

    def forward(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        raise RuntimeError(f"{type(layer).__name__}: the engine found no attention layer in this model")


def with_groups(
    metadata: AttentionMetadata, inputs: Inputs, tables: Sequence[torch.Tensor]
) -> AttentionMetadata:
    """Add the metadata of the groups of layers after the first. tables: the rows' block tables of each group."""
    if len(tables) == 1:
        return metadata
    more = zip(inputs.more_slot_mappings, tables[1:], strict=True)
    groups = tuple(replace(metadata, slot_mapping=slots, block_table=table) for slots, table in more)
    return replace(metadata, groups=groups)


def metadata_of(
    backend: AttentionBackend,
    inputs: Inputs,
    block_table: torch.Tensor,
    plan: Any = None,
    padded: bool = True,
) -> AttentionMetadata:
    """Make the step's metadata. padded: there may be padding tokens after the last row, as in a graph."""
    return AttentionMetadata(
        inputs.slot_mapping, inputs.cu_seqlens_q, inputs.seq_lens, block_table, inputs.max_seqlen_q,
        inputs.max_seqlen_k, inputs.num_decodes, inputs.max_decode_seqlen_k, backend, plan, padded,
    )  # fmt: skip


def store(layer: Any, k: torch.Tensor | None, v: torch.Tensor | None, metadata: AttentionMetadata) -> None:
    """Write keys and values into the layer's cache."""
    if k is not None and v is not None:
        key_cache, value_cache = layer.kv_cache
        store_kvcache(k, v, key_cache, value_cache, metadata.slot_mapping, layer.k_scale, layer.v_scale)
