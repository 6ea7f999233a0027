"""Attention metadata of the current step, which the engine's runner sets and the attention layers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class CrossMetadata:
    """The states of an encoder that each of T tokens attends to: block_table [T, max_blocks], seq_lens [T] int32."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_k: int


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch of B sequences with T tokens in all; a sequence's tokens are contiguous.

    slot_mapping   [T] int64: block * block_size + offset where each token's key and value go; -1: nowhere (padding)
    cu_seqlens_q   [B + 1] int32: where each sequence's queries start
    seq_lens       [B] int32: keys of each sequence, this step's included
    block_table    [B, max_blocks] int32
    max_seqlen_q, max_seqlen_k: largest of the batch (host integers: no synchronization)
    num_decodes    sequences of one query, which come first, where the step's maker counted them
    max_decode_seqlen_k  the largest seq_len of those
    backend        an AttentionBackend (fastkernels.engine.execution.attention.base); None: the layer calls the ops
    plan           the backend's own
    padded         whether there may be tokens behind the last sequence's
    groups         the metadata of layers whose kv_group is 1, 2, ..., with a slot_mapping and block_table of their own
    state_slots    [B] int32: the slot of each sequence in `states` of the layers that keep some; 0 for padding
    cross          of a decoder with cross attention
    key_rows       of an encoder: the tokens that others see, sequence after sequence; seq_lens counts these. None: all
    fresh          [B] bool: whether the sequence begins in this step: its state is zero, whatever the slot holds
    tree           [T] int64: which of the keys before its own each query sees; see attention_prefill. None: all
    most_tokens    of data-parallel ranks that step together: tokens of the largest one, with padding. 0: T in all
    num_whole, num_whole_tokens  of bidirectional attention: the first sequences, which compute all of their tokens

    `decode_only`: every sequence has exactly one query. Where some have none, there are fewer tokens than sequences.
    """

    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_decodes: int = 0
    max_decode_seqlen_k: int = 0
    backend: Any = None
    plan: Any = None
    padded: bool = True
    groups: tuple[AttentionMetadata, ...] = ()
    state_slots: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None
    cross: CrossMetadata | None = None
    tree: torch.Tensor | None = None
    num_whole: int = 0
    num_whole_tokens: int = 0
    most_tokens: int = 0

    def of(self, layer: Any) -> AttentionMetadata:
        """The metadata of an attention layer's KV group."""
        return self.groups[layer.kv_group - 1] if layer.kv_group else self

    @property
    def decode_only(self) -> bool:
        return self.max_seqlen_q == 1 and len(self.slot_mapping) == len(self.seq_lens)


_current: AttentionMetadata | None = None
_derived: dict[
    Any, Any
] = {}  # what ops computed from the current step's batch for all layers, see once_per_step


@contextmanager
def forward_context(metadata: AttentionMetadata) -> Iterator[None]:
    """Make `metadata` the current step's."""
    global _current, _derived
    previous, _current, _derived = (_current, _derived), metadata, {}
    try:
        yield
    finally:
        _current, _derived = previous


def get_forward_context() -> AttentionMetadata:
    """The current step's metadata. Raises RuntimeError outside `forward_context`."""
    if _current is None:
        raise RuntimeError("no forward context: call the model inside `with forward_context(metadata)`")
    return _current


def most_tokens(tokens: int) -> int:
    """Tokens of the largest data-parallel rank in this step, for one with so many."""
    return max(tokens, _current.most_tokens) if _current is not None else tokens


def once_per_step(make: Callable[..., T], tensor: torch.Tensor, *args: Any, captured: bool = False) -> T:
    """The value of make(tensor, *args), kept on a CPU for calls with the same arguments in the same `forward_context`.

    For what all layers derive from the batch. Tensors count as the same by address and layout, so they must not change
    during a step. Outside a context and on other devices, whose graphs replay a step, `make` runs on every call.

    captured: keep it on other devices, too: all calls of a context are in one graph, or in none
    """
    if _current is None or not (tensor.is_cpu or captured):
        return make(tensor, *args)
    given = (tensor, *args)
    key = (make, *((t.data_ptr(), t.shape, t.stride()) if isinstance(t, torch.Tensor) else t for t in given))
    found = _derived.get(key)
    if found is None:
        found = _derived[key] = make(*given), given  # tensors that are alive keep their addresses
    return found[0]
