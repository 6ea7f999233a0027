"""Places behind drafts: which tokens precede each, and which of the sampled ones count."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DraftPlaces(NamedTuple):
    """The P places where a step samples: for each sequence the one behind its last token, and one behind each draft.

    tokens   [P] int64: the draft before each place; at the first place of a sequence, any token
    parents  [P] int64: the place before each; the first place of a sequence has itself
    depth    the largest number of drafts on a path
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: int

    def add_drafts(self, counts: torch.Tensor, first: int) -> None:
        """Add the drafts before places to their counts [n, V] int32, those of the places first, first + 1, ..."""
        at = torch.arange(first, first + len(counts), device=counts.device)
        for _ in range(self.depth):
            before = self.parents[at]
            counts.scatter_add_(1, self.tokens[at][:, None], (before != at).int()[:, None])
            at = before

    def taken(self, sampled: torch.Tensor) -> torch.Tensor:
        """Whether each of the sampled tokens [P] int64 joins its sequence: all drafts before it were sampled, too."""
        first = self.parents == torch.arange(len(self.parents), device=sampled.device)
        own = first | (sampled[self.parents] == self.tokens)
        found = own
        for _ in range(self.depth - 1):
            found = own & found[self.parents]
        return found
