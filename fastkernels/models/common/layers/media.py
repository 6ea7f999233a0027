"""Media in the prompts of a language model: images, videos and audio, their features and their positions.

A model with `ARCH.media` is a decoder with these methods more:

placeholders          {kind: text that stands for one medium in a prompt}, for chat templates without media
token_ids             {kind: the token that is repeated for each feature of a medium}
merge, patch_channels  the side of a block of patches that is one feature; C * t * p * p
timestamps            whether the text has the time of each step of a video in front of its features
merged(grid)          the grid of a medium's features, from that of its patches (steps, rows, columns)
offsets(grid, seconds)  positions of these features from that of the first one; seconds: from step to step, of a video
encode(patches, grids)  features [sum of merged grids, width] of images and videos: patches [P, C * t * p * p], medium
                      after medium. Patches attend to those of the same step, so that a video's steps may be apart
audio_bins, audio_frames  of a model that reads audio: bins of a frame of the spectrum, and frames of a feature
audio_size(length)    the number of features of an audio of so many frames
encode_audio(frames, lengths)  features [sum of sizes, width] of audio: frames [bins, sum of lengths], one after another
forward(input_ids, positions, media)  positions may be [3, T]: temporal, height and width (M-RoPE)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

Grid = tuple[int, int, int]  # steps, rows, columns


@dataclass(frozen=True)
class Media:
    """Features of media that tokens of a step have in place of an embedding.

    rows      [M] int64: these tokens, in order
    features  [M, n * H]: the embedding, and for the first n - 1 layers what is added to their output (deepstack)
    """

    rows: torch.Tensor
    features: torch.Tensor

    def insert(self, hidden: torch.Tensor) -> torch.Tensor:
        """The embeddings [T, H] with those of the media."""
        return hidden.index_copy(0, self.rows, self.features[:, : hidden.shape[1]].to(hidden.dtype))

    def after(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output [T, H] of a layer with what the media add to it."""
        size = hidden.shape[1]
        own = self.features[:, (layer + 1) * size : (layer + 2) * size]
        return hidden if own.shape[1] == 0 else hidden.index_add(0, self.rows, own.to(hidden.dtype))


def mrope_positions(spans: Sequence[tuple[int, np.ndarray]]) -> tuple[np.ndarray, int]:
    """Positions of a sequence with media: (positions [3, n] int64 of its first n tokens, shift).

    spans: (first token, offsets [3, m] of its m features) of each medium, in order. The n tokens end with the last
    medium. A token behind them has position index + shift in all three axes. A medium's features are at the position of
    its first token plus their offsets; the text goes on behind the largest of these.
    """
    parts: list[np.ndarray] = []
    token = position = 0
    for start, offsets in spans:
        text = np.arange(position, position + start - token)
        parts.append(np.broadcast_to(text, (3, len(text))))
        position += start - token
        parts.append(position + offsets)
        position += int(offsets.max()) + 1
        token = start + offsets.shape[1]
    if not parts:
        return np.zeros((3, 0), np.int64), 0
    return np.concatenate(parts, axis=1).astype(np.int64), position - token


def grid_offsets(grid: Grid, step: float = 1.0) -> np.ndarray:
    """Offsets [3, n] of the features of a grid. step: from one step of a video to the next, rounded down at each."""
    made = np.indices(grid).reshape(3, -1)
    if step != 1.0:
        made[0] = (made[0].astype(np.float32) * np.float32(step)).astype(np.int64)
    return made
