"""How queries and documents of late interaction become the tokens of a model, and which of their vectors count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Shaped:
    """Token ids of one text.

    seen  the number of first tokens that all attend to
    kept  [tokens] bool: whose vectors count
    """

    ids: list[int]
    seen: int
    kept: np.ndarray


@dataclass(frozen=True)
class Form:
    """The form of a query or of a document.

    marker   token id behind the first token; None: none
    length   the most tokens, the marker included; the last token is kept. None: no limit of its own
    filler   token id that fills up to `length`. These tokens attend to the others, which do not see them
    seen     whether the others see them all the same
    first    whether the first token's vector counts
    skipped  token ids whose vectors do not count
    """

    marker: int | None = None
    length: int | None = None
    filler: int | None = None
    seen: bool = False
    first: bool = True
    skipped: frozenset[int] = field(default_factory=frozenset)

    def shape(self, ids: Sequence[int]) -> Shaped:
        """The tokens of a text, from those of the tokenizer with its special tokens."""
        made = list(ids)
        if self.length is not None:
            room = self.length - (self.marker is not None)
            if len(made) > room:
                made = [*made[: room - 1], made[-1]]
        if self.marker is not None:
            made = [*made[:1], self.marker, *made[1:]]
        seen = len(made)
        if self.filler is not None and self.length is not None:
            made += [self.filler] * (self.length - seen)
        kept = np.array([token not in self.skipped for token in made])
        kept[0] &= self.first
        return Shaped(made, len(made) if self.seen else seen, kept)


def unit(vectors: torch.Tensor, normalize: bool = True) -> torch.Tensor:
    """Vectors in float32, of length 1 if `normalize`."""
    return F.normalize(vectors.float(), dim=-1) if normalize else vectors.float()
