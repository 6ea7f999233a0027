"""vLLM's top-k and top-p sampler."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.sampling.sampling import sampling, threshold


class VllmTopKTopPSampler(nn.Module):
    """vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler: sample from logits [B, V], already divided by the
    temperature. k: [B] int, p: [B] float; None keeps all tokens.

    Returns (token ids [B] int64, logits or log-probabilities after filtering). The second is None unless logprobs_mode
    is 'processed_logits' or 'processed_logprobs'. The seed of a row comes from its generator, else from torch's. The
    noise is float32 with a resolution of 2^-32 near 0, also with use_fp64_gumbel.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__()
        self.logprobs_mode = logprobs_mode
        self.use_fp64_gumbel = use_fp64_gumbel

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = len(logits)
        seeds = torch.randint(1 << 62, (rows,), device=logits.device)
        for row, generator in generators.items():
            seeds[row] = torch.randint(1 << 62, (), generator=generator, device=generator.device)
        ones = torch.ones(rows, device=logits.device)
        top_k = torch.zeros_like(seeds) if k is None else k
        args = (ones, top_k.int(), ones if p is None else p.float(), torch.zeros_like(ones))
        ids = sampling(logits, *args, seeds, torch.zeros_like(seeds))
        if self.logprobs_mode not in ("processed_logits", "processed_logprobs"):
            return ids, None
        if k is not None or p is not None:
            logits = logits.masked_fill(logits.float() < threshold(logits.float(), *args), -torch.inf)
        if self.logprobs_mode == "processed_logits":
            return ids, logits
        return ids, logits.log_softmax(dim=-1, dtype=torch.float32)


_NOTE = (
    "in a live host the host's sampler stays: it belongs to the model runner and not to the model, its forward is bound"
    " on the instance, and a seeded request would draw other tokens than before"
)

TARGETS = {
    "sampling": (
        Target(
            "vllm",
            "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
            "VllmTopKTopPSampler",
            "standalone",
            note=_NOTE,
        ),
    ),
}
