"""Outputs of models by family, as the metrics read them. All runs of an item have the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch


class Sized:
    """Outputs that can be compared only if their tensors have the same shapes, and their lists the same lengths."""

    def sizes(self) -> tuple[Any, ...]:
        found: list[Any] = []
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, torch.Tensor):
                found.append(tuple(value.shape))
            elif isinstance(value, Sequence):
                found.append(len(value))
        return tuple(found)

    def has_nan(self) -> bool:
        values = [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]
        return any(bool(v.isnan().any()) for v in values if isinstance(v, torch.Tensor))


@dataclass(frozen=True)
class Scores(Sized):
    """Raw scores of tokens or classes, and the true ones. Steps of sequence i are lengths[i] consecutive rows."""

    logits: torch.Tensor  # [n, V]
    targets: torch.Tensor  # [n]
    lengths: Sequence[int]


@dataclass(frozen=True)
class Embeddings(Sized):
    """Vectors of queries and of a corpus; document `relevant[q]` answers query q."""

    queries: torch.Tensor  # [Q, D]
    documents: torch.Tensor  # [N, D]
    relevant: torch.Tensor  # [Q]


@dataclass(frozen=True)
class Images(Sized):
    """Images or frames with values in [0, 1], and the latents that they were decoded from."""

    pixels: torch.Tensor  # [n, 3, H, W]
    latents: torch.Tensor  # [n, ...]


@dataclass(frozen=True)
class Detections(Sized):
    """Boxes of each image: dictionaries of boxes [k, 4] as x1, y1, x2, y2, scores [k] and labels [k]."""

    images: Sequence[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Masks(Sized):
    """The class of each pixel."""

    classes: torch.Tensor  # [n, H, W], integers
    count: int  # number of classes


@dataclass(frozen=True)
class Transcripts(Sized):
    """Texts, and the log probability of each of their words: [n, words], 0 behind a text's end."""

    texts: Sequence[str]
    logprobs: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True)
class Spectrograms(Sized):
    mels: torch.Tensor  # [n, bands, frames]


@dataclass(frozen=True)
class Actions(Sized):
    """Actions of a policy, and the range of each of its dimensions."""

    values: torch.Tensor  # [n, steps, A]
    low: torch.Tensor  # [A]
    high: torch.Tensor  # [A]


@dataclass(frozen=True)
class Structures(Sized):
    points: torch.Tensor  # [n, atoms, 3], angstroms


@dataclass(frozen=True)
class Ratings(Sized):
    """Scores of user and item pairs, and whether the user took the item."""

    scores: torch.Tensor  # [n]
    labels: torch.Tensor  # [n], 0 or 1
