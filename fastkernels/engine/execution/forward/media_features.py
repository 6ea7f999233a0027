"""The features of media on a rank, which encodes those of a step at once and keeps them until they are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastkernels.core.dispatch import direct_calls
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.steps.step import Encoding, StepMedia
from fastkernels.models.common.layers.media import Media


class MediaFeatures:
    """model: with the interface of fastkernels/models/common/layers/media.py."""

    def __init__(self, model: Any, device: torch.device):
        self._model, self._device = model, device
        self._features: dict[bytes, torch.Tensor] = {}

    def prepare(self, step: StepMedia) -> Media | None:
        """Encode the step's media. Returns the features that its tokens have; None: it has no such tokens."""
        for digest in step.dropped:
            self._features.pop(digest, None)
        audio = [item for item in step.encodes if item.kind == "audio"]
        visual = [item for item in step.encodes if item.kind != "audio"]
        for items, encode in ((visual, self._encode), (audio, self._encode_audio)):
            if not items:
                continue
            with direct_calls(self._device):
                found = encode(items)
            parts = found.split([item.size for item in items])
            # Copies, so that the features of one medium can be freed without those of the others
            own = parts if len(parts) == 1 else [part.clone() for part in parts]
            self._features.update(zip((item.digest for item in items), own, strict=True))
        if not step.spans:
            return None
        rows = np.concatenate([np.arange(token, token + count) for token, _, _, count in step.spans])
        features = [self._features[digest][first : first + count] for _, digest, first, count in step.spans]
        return Media(self._to_device(torch.from_numpy(rows)), torch.cat(features))

    def _encode(self, items: Sequence[Encoding]) -> torch.Tensor:
        patches = torch.cat([self._to_device(item.values) for item in items])
        return self._model.encode(patches, [item.grid for item in items])

    def _encode_audio(self, items: Sequence[Encoding]) -> torch.Tensor:
        frames = torch.cat([self._to_device(item.values) for item in items], dim=1)
        return self._model.encode_audio(frames, [item.grid[0] for item in items])

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
        if hasattr(self._model, "encode_audio"):
            length = tokens * self._model.audio_frames
            self._model.encode_audio(patches.new_zeros(self._model.audio_bins, length), [length])
        return found.shape[1] * found.element_size()

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return transfer.to_device(tensor, self._device)
