"""Next tokens from logits, each row by its own request's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .request import Request


class Sampler:
    """Samples a batch. A seeded request draws from a generator of its own, so other rows do not change its tokens;
    the others share one stream that the engine's seed starts.
    """

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """logits: [B, V], row i is of requests[i]. Returns B token ids."""
        logits = _ban_ends(logits, requests)
        greedy = torch.argmax(logits, dim=-1)
        rows = [i for i, r in enumerate(requests) if not r.params.greedy]
        if rows:
            some = logits if len(rows) == len(requests) else logits[rows]
            greedy[rows] = self._sample(some.float(), [requests[i] for i in rows])
        return greedy.tolist()

    def _sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        params = [r.params for r in requests]
        logits = logits / torch.tensor([[p.temperature] for p in params], device=self.device)
        if any(p.top_p < 1.0 or p.top_k > 0 for p in params):
            vocab = logits.shape[-1]
            top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocab] for p in params], device=self.device)
            top_p = torch.tensor([[p.top_p] for p in params], device=self.device)
            logits = filter_top(logits, top_k, top_p)
        # argmax(p / e) with e ~ Exp(1) draws from p: no synchronization, and a row depends on its own noise alone.
        noise = torch.empty_like(logits).exponential_(generator=self.generator)
        for i, request in enumerate(requests):
            if request.params.seed is not None:
                noise[i].exponential_(generator=self._generator(request))
        # A float32 draw can be exactly 0, and p / 0 would win whatever p is.
        return torch.argmax(torch.softmax(logits, dim=-1) / noise.clamp_min_(1e-30), dim=-1)

    def _generator(self, request: Request) -> torch.Generator:
        if request.generator is None:
            request.generator = torch.Generator(self.device).manual_seed(request.params.seed or 0)
        return request.generator


def filter_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits with -inf for tokens that are not among the top_k, or not in the smallest set with mass top_p of those.

    logits: [B, V] float32; top_k: [B, 1] int64 in [1, V]; top_p: [B, 1] float32 in (0, 1]. Ties go by sort order.
    """
    ordered, index = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = (
        probs.cumsum(dim=-1) - probs
    )  # mass of the more likely tokens; 0 for the first, which always stays
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, index, ordered)


def _ban_ends(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Logits with -inf at the end tokens of requests that have not generated their min_tokens."""
    early = [(i, r) for i, r in enumerate(requests) if len(r.output_token_ids) < r.params.min_tokens]
    if not any(r.end_token_ids for _, r in early):
        return logits
    logits = logits.clone()
    for i, request in early:
        logits[i, list(request.end_token_ids)] = -torch.inf
    return logits
