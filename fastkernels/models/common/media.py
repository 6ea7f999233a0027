"""Images in the prompts of a language model: their features and their positions.

A model with `ARCH.media` is a decoder with these methods more:

placeholders          {kind: text that stands for one medium in a prompt}, for chat templates without media
token_ids             {kind: the token that is repeated for each feature of a medium}
merge, patch_channels  the side of a block of patches that is one feature; C * t * p * p
merged(grid)          the grid of a medium's features, from that of its patches (steps, rows, columns)
encode(patches, grids)  features [sum of merged grids, width] of media: patches [P, C * t * p * p], medium after medium
forward(input_ids, positions, media)  positions may be [3, T]: temporal, height and width (M-RoPE)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

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


def mrope_positions(spans: Sequence[tuple[int, Grid]]) -> tuple[np.ndarray, int]:
    """Positions of a sequence with media: (positions [3, n] int64 of its first n tokens, shift).

    spans: (first token, grid of features) of each medium, in order. The n tokens end with the last medium. A token
    behind them has position index + shift in all three axes. A medium's features are at the position of its first
    token plus their place in the grid; the text goes on behind the largest of these.
    """
    parts: list[np.ndarray] = []
    token = position = 0
    for start, grid in spans:
        text = np.arange(position, position + start - token)
        parts.append(np.broadcast_to(text, (3, len(text))))
        position += start - token
        parts.append(position + np.indices(grid).reshape(3, -1))
        position += max(grid)
        token = start + prod(grid)
    if not parts:
        return np.zeros((3, 0), np.int64), 0
    return np.concatenate(parts, axis=1).astype(np.int64), position - token
