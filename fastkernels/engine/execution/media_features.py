"""The features of media on a rank, which encodes those of a step at once and keeps them until they are dropped."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from fastkernels.core.dispatch import direct_calls
from fastkernels.engine.execution.step import StepMedia
from fastkernels.models.common.media import Media


class MediaFeatures:
    """model: with the interface of fastkernels/models/common/media.py."""

    def __init__(self, model: Any, device: torch.device):
        self._model, self._device = model, device
        self._features: dict[bytes, torch.Tensor] = {}

    def prepare(self, step: StepMedia) -> Media | None:
        """Encode the step's media. Returns the features that its tokens have; None: it has no such tokens."""
        for digest in step.dropped:
            self._features.pop(digest, None)
        if step.encodes:
            patches = torch.cat([self._to_device(item.values) for item in step.encodes])
            grids = [item.grid for item in step.encodes]
            with direct_calls(self._device):
                found = self._model.encode(patches, grids)
            parts = found.split([prod(self._model.merged(grid)) for grid in grids])
            # Copies, so that the features of one medium can be freed without those of the others
            own = parts if len(parts) == 1 else [part.clone() for part in parts]
            self._features.update(zip((item.digest for item in step.encodes), own, strict=True))
        if not step.spans:
            return None
        rows = np.concatenate([np.arange(token, token + count) for token, _, _, count in step.spans])
        features = [self._features[digest][first : first + count] for _, digest, first, count in step.spans]
        return Media(self._to_device(torch.from_numpy(rows)), torch.cat(features))

    def positions(self, step: StepMedia, positions: torch.Tensor) -> torch.Tensor:
        """The positions [3, T] of a step, from those of its tokens behind media [T]."""
        axes = positions.expand(3, -1).clone()
        own = self._to_device(torch.from_numpy(np.ascontiguousarray(step.positions)))
        return axes.index_copy_(1, self._to_device(torch.from_numpy(step.rows)), own)

    @torch.inference_mode()
    def run_largest(self, tokens: int) -> int:
        """Encode one medium of about this number of features, to measure the memory. Returns the bytes of a feature."""
        merge, channels = self._model.merge, self._model.patch_channels
        side = max(1, int(tokens**0.5)) * merge
        weight = next(self._model.visual.parameters())
        patches = torch.zeros(side * side, channels, dtype=weight.dtype, device=self._device)
        found = self._model.encode(patches, [(1, side, side)])
        return found.shape[1] * found.element_size()

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
