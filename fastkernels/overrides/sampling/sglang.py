"""SGLang's sampler, in two versions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.sampling.sampling import sampling


class SGLangSampler_0_5_16(nn.Module):
    """sglang.srt.layers.sampler.Sampler before 0.5.23: sample from logits_output.next_token_logits [B, V].

    Reads is_all_greedy, temperatures [B, 1], top_ks, top_ps, min_ps [B] and sampling_seed [B] of sampling_info. Without
    sampling_seed, seeds come from torch's generator. Raises ValueError for log-probabilities and custom logit
    processors.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        return self._sample(logits_output.next_token_logits, sampling_info, return_logprob, positions)

    def _sample(
        self, logits: torch.Tensor, info: Any, return_logprob: bool, positions: torch.Tensor
    ) -> torch.Tensor:
        if return_logprob or getattr(info, "has_custom_logit_processor", False):
            raise ValueError("log-probabilities and custom logit processors need SGLang's own Sampler")
        seeds = info.sampling_seed
        if seeds is None:
            seeds = torch.randint(1 << 62, (len(logits),), device=logits.device)
        temperature = torch.zeros_like(info.top_ps) if info.is_all_greedy else info.temperatures.view(-1)
        ids = sampling(
            logits,
            temperature.float(),
            info.top_ks.int(),
            info.top_ps,
            info.min_ps,
            seeds.long(),
            positions.long(),
        )
        return ids if info.is_all_greedy else ids.int()


class SGLangSampler(SGLangSampler_0_5_16):
    """sglang.srt.layers.sampler.Sampler since 0.5.23; see SGLangSampler_0_5_16.

    logprob_logits, for log-probabilities, is ignored.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._sample(logits_output.next_token_logits, sampling_info, return_logprob, positions)


_SAMPLER = "sglang.srt.layers.sampler:Sampler"
_NOTE = (
    "in a live host the host's sampler stays: it belongs to the model runner and not to the model, and also computes"
    " log-probabilities; ours applies min_p first and top_p to the tokens that top_k keeps, SGLang applies top_p to all"
    " tokens and min_p last"
)

TARGETS = {
    "sampling": (
        Target("sglang", _SAMPLER, "SGLangSampler_0_5_16", "standalone", "<0.5.23", note=_NOTE),
        Target("sglang", _SAMPLER, "SGLangSampler", "standalone", ">=0.5.23", note=_NOTE),
    ),
}
