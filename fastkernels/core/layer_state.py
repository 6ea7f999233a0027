"""Data that a layer keeps of a sequence between steps, as the layer declares it in its attribute `keeps`.

The engine allocates it and knows nothing else about the layer. A layer with a KVSpec gets `kv_cache` and `kv_group`
(see overrides/attention/attention.py), a layer with a StateSpec gets `states`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVSpec:
    """Numbers for every token, in paged blocks. window: tokens that a query sees, itself included; None: all.

    cross: of an encoder's states, in blocks of their own
    """

    window: int | None = None
    cross: bool = False


@dataclass(frozen=True)
class StateSpec:
    """Tensors of a fixed size for a sequence, however long it is: recurrent states, the last inputs of a convolution.

    tensors: {name: (shape, dtype)}; dtype None: the model's. The engine sets the layer's `states` to {name: tensor
    [slots, *shape]}. A step's AttentionMetadata has the slot of each sequence; slot 0 is for padding.
    swapped: names of states whose last dimension but one (keys, channels) is contiguous: faster, and vLLM's order.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]
    swapped: frozenset[str] = frozenset()

    def new(self, slots: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return zeros for `states` of a model in this dtype."""
        return {
            name: zero_states((slots, *shape), own or dtype, device, name in self.swapped)
            for name, (shape, own) in self.tensors.items()
        }


def zero_states(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, swapped: bool
) -> torch.Tensor:
    """Return zeros of this shape; swapped: the last dimension but one is contiguous."""
    if not swapped:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=device).transpose(-1, -2)
