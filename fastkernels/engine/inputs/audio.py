"""Reads the audio of a prompt: features by the checkpoint's feature extractor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.engine.cache.cross_blocks import Source
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError


@dataclass(frozen=True)
class SourcePrompt:
    """A decoder's prompt with the source that its encoder reads. text: None for token ids"""

    text: str | None
    token_ids: list[int]
    source: Source


class AudioReader:
    """Makes a SourcePrompt of token ids and audio. Safe in any thread. Raises CheckpointError without an extractor."""

    def __init__(self, folder: Path, model: Any, dtype: torch.dtype):
        self._shape, self._dtype = tuple(model.source_shape), dtype
        try:
            from transformers import AutoFeatureExtractor

            self._extractor: Any = AutoFeatureExtractor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(
                f"the feature extractor of {folder} (preprocessor_config.json) cannot be used:"
                f" {' '.join(str(error).split())}"
            ) from error
        self.rate: int = self._extractor.sampling_rate
        self.most: int = self._shape[1] * self._extractor.hop_length  # samples

    def read(self, text: str | None, ids: Sequence[int], data: Mapping[str, Any]) -> SourcePrompt:
        """data: {'audio': samples or (samples, their rate)}. Raises ValueError for another rate, and for long audio."""
        if set(data) != {"audio"}:
            given = ", ".join(sorted(data)) or "none"
            raise ValueError(f"the prompt needs one audio in multi_modal_data, got {given}")
        value = data["audio"]
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        samples, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, self.rate)
        made = np.asarray(samples, dtype=np.float32)
        if rate != self.rate:
            raise ValueError(
                f"the audio has a sampling rate of {rate}, and this model takes {self.rate}: resample it"
            )
        if made.ndim != 1 or not len(made):
            raise ValueError(f"the audio must be samples of one channel [n], got shape {list(made.shape)}")
        if len(made) > self.most:
            limit = self.most / self.rate
            raise ValueError(
                f"the audio has {len(made) / self.rate:.1f} s, and at most {limit:g} s are possible: cut it into parts"
            )
        if not np.isfinite(made).all():
            raise ValueError("the audio has samples that are not finite numbers")
        return SourcePrompt(text, list(ids), self.source(made))

    def source(self, made: np.ndarray) -> Source:
        """The features of samples [n] float32, at most `most`. Raises ValueError."""
        found = self._extractor(made, sampling_rate=self.rate, return_tensors="pt")["input_features"][0]
        if tuple(found.shape) != self._shape:
            raise ValueError(
                f"the feature extractor makes {list(found.shape)}, and the model reads {list(self._shape)}: the"
                " checkpoint's preprocessor_config.json belongs to another model"
            )
        if not torch.isfinite(found).all():
            raise ValueError(
                f"the audio is too loud for the feature extractor: its samples reach {np.abs(made).max():g}, and 1 is"
                " full scale"
            )
        digest = hashlib.blake2b(made.tobytes(), digest_size=16).digest()
        return Source(digest, found.to(self._dtype))
