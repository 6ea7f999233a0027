"""Sampling that avoids loops: a token that was generated shortly before is drawn again (VALL-E 2, arXiv 2406.05370)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

RING = 64  # tokens of a row that are kept, the longest window
AGAIN = 0x5DEECE66D  # added to a row's seed for the second draw


@dataclass(frozen=True)
class RepetitionAware:
    """Repetition-aware sampling, as CosyVoice does it. Raises ValueError for values out of range.

    A token is drawn from the most likely ones: as few as have `top_p` of the mass of the whole vocabulary, and at most
    `top_k`. If it makes up at least `share` of the last `window` generated tokens, it is banned, and another token is
    drawn from all others.
    """

    top_p: float = 0.8
    top_k: int = 25
    window: int = 10
    share: float = 0.1

    def __post_init__(self) -> None:
        if type(self.top_k) is not int or self.top_k < 1:
            raise ValueError(f"top_k must be an integer of at least 1, got {self.top_k!r}")
        if type(self.window) is not int or not 1 <= self.window <= RING:
            raise ValueError(f"window must be an integer from 1 to {RING}, got {self.window!r}")
        for name in ("top_p", "share"):
            if type(getattr(self, name)) not in (int, float) or not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)!r}")

    def nucleus(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [B, V] float32 with -inf outside the most likely tokens."""
        values, ids = logits.topk(min(self.top_k, logits.shape[1]), dim=-1)
        mass = (values - logits.logsumexp(-1, keepdim=True)).exp()
        kept = values.masked_fill(mass.cumsum(-1) - mass >= self.top_p, -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter_(1, ids, kept)

    def repeats(self, recent: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[B] bool: whether ids [B] are repetitions.

        recent   [B, RING] int64: the last tokens, that of offset i at i % RING; -1 for none
        offsets  [B] int64: tokens before these
        """
        age = (offsets[:, None] - 1 - torch.arange(RING, device=recent.device)) % RING
        same = (recent == ids[:, None]) & (age < self.window)
        return same.sum(-1) >= self.window * self.share
