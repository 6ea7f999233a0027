"""The encoder's side of an encoder-decoder on a rank: it computes the keys and values of sources, and finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastkernels.core.dispatch import direct_calls
from fastkernels.core.forward_context import CrossMetadata
from fastkernels.engine.steps.step import StepSources


class CrossStates:
    """model: with the interface of fastkernels/models/audio/whisper.py, whose cross attention has caches.

    table: [max_num_seqs + 1, blocks of a source] int32; slots without a request have the reserved block 0
    """

    def __init__(self, model: Any, max_num_seqs: int, block_size: int, device: torch.device):
        self._model, self._device, self._size = model, device, block_size
        self._length: int = model.source_length
        width = -(-self._length // block_size)
        self.table = torch.zeros(max_num_seqs + 1, width, dtype=torch.int32, device=device)

    def update(self, step: StepSources) -> None:
        """Note the blocks of requests that enter slots, and compute those of new sources, all at once."""
        slots = torch.from_numpy(step.slots).to(self._device)
        self.table.index_copy_(0, slots, torch.from_numpy(step.tables).to(self._device))
        if not step.encodes:
            return
        features = torch.stack([values for values, _ in step.encodes]).to(self._device)
        at = np.arange(self._length)
        places = [
            row[at // self._size].astype(np.int64) * self._size + at % self._size for _, row in step.encodes
        ]
        with direct_calls(self._device):
            states = self._model.encode_source(features)
            self._model.store_source(states, torch.from_numpy(np.concatenate(places)).to(self._device))

    def metadata(self, token_slots: torch.Tensor) -> CrossMetadata:
        """The states of each token of a step, by the slot of its row [T]. In a CUDA graph from its static inputs."""
        lengths = torch.full_like(token_slots, self._length, dtype=torch.int32)
        return CrossMetadata(self.table.index_select(0, token_slots), lengths, self._length)
