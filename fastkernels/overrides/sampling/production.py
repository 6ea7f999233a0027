"""Production's kernels for the ops of this family, called with the ops' arguments."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.baseline import Baseline, Function
from fastkernels.overrides.kit.libraries import T, from_flashinfer, from_vllm


class Filters:
    """Compute (all greedy, any top_k, any top_p) of a batch, which a host knows on the CPU.

    They are read from the arguments. During CUDA graph capture, which forbids that, the values of the last call with
    this shape are used: those of the warm-up.
    """

    def __init__(self) -> None:
        self.known: dict[torch.Size, tuple[bool, bool, bool]] = {}

    def __call__(self, logits: T, temperature: T, top_k: T, top_p: T) -> tuple[bool, bool, bool]:
        if not (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
            some_k = ((top_k > 0) & (top_k < logits.shape[-1])).any()
            flags = torch.stack([(temperature <= 1e-5).all(), some_k, (top_p < 1.0).any()]).tolist()
            self.known[logits.shape] = (flags[0], flags[1], flags[2])
        return self.known[logits.shape]


def no_sampling(logits: T, temperature: T, top_k: T, top_p: T, min_p: T, *_: Any) -> str | None:
    greedy = temperature <= 1e-5
    if bool(greedy.any()) and not bool(greedy.all()):
        return "the host needs more than one call for greedy and sampled rows in a batch"
    if bool((min_p > 0).any()):
        return "the hosts apply min_p in a separate step"
    return None


def _vllm_sampling() -> Function:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler, filters = TopKTopPSampler(), Filters()

    def sampling(logits: T, temperature: T, top_k: T, top_p: T, min_p: T, *_: Any) -> T:
        greedy, has_k, has_p = filters(logits, temperature, top_k, top_p)
        if greedy:
            return logits.argmax(dim=-1)
        scaled = logits.float().div_(temperature[:, None])
        return sampler(scaled, {}, top_k if has_k else None, top_p if has_p else None)[0]

    return sampling


def _no_sampling(logits: T, temperature: T, top_k: T, top_p: T, min_p: T, *_: Any) -> str | None:
    if bool((top_k <= 0).any()) and bool((top_k > 0).any()):
        return "rows without top_k need the size of the vocabulary as top_k"
    return no_sampling(logits, temperature, top_k, top_p, min_p)


_NOISE = "it samples with different noise"


def _filtered() -> Function:
    from flashinfer import sampling as kernels

    filters = Filters()

    def sampling(logits: T, temperature: T, top_k: T, top_p: T, *_: Any) -> T:
        has_k, has_p = filters(logits, temperature, top_k, top_p)[1:]
        probs = torch.softmax(logits.float().div_(temperature[:, None]), dim=-1)
        if has_k:
            return kernels.top_k_top_p_sampling_from_probs(probs, top_k, top_p, deterministic=True).long()
        if has_p:
            return kernels.top_p_sampling_from_probs(probs, top_p, deterministic=True).long()
        return kernels.sampling_from_probs(probs, deterministic=True).long()

    return sampling


def _no_filtered(logits: T, temperature: T, top_k: T, top_p: T, min_p: T, *_: Any) -> str | None:
    if bool((temperature <= 1e-5).any()):
        return "it only samples; the hosts compute the argmax of greedy rows"
    if bool((top_k <= 0).any()) and bool((top_k > 0).any()):
        return "it needs top_k in every row or in none"
    return no_sampling(logits, temperature, top_k, top_p, min_p)


def _torch_sampling() -> Function:
    filters = Filters()

    def sampling(logits: T, temperature: T, top_k: T, top_p: T, *_: Any) -> T:
        greedy, has_k, has_p = filters(logits, temperature, top_k, top_p)
        if greedy:
            return logits.argmax(dim=-1)
        x = logits.float().div_(temperature[:, None])
        if not has_k and not has_p:
            return (x.softmax(dim=-1) / torch.empty_like(x).exponential_()).argmax(dim=-1)
        values, ids = x.sort(dim=-1, descending=True)
        if has_k:
            last = values.gather(
                1, torch.where(top_k > 0, top_k, x.shape[-1]).clamp_max(x.shape[-1]).long()[:, None] - 1
            )
            values = values.masked_fill(values < last, -torch.inf)
        probs = values.softmax(dim=-1)
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p[:, None], 0.0)
        return ids.gather(1, (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1, keepdim=True))[
            :, 0
        ]

    return sampling


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "sampling": (
        from_vllm(_vllm_sampling, _no_sampling, differs=_NOISE, unchecked=(0,)),
        from_flashinfer(_filtered, _no_filtered, differs=_NOISE, unchecked=(0,), graph=False),
        Baseline("torch", "library", _torch_sampling, refuses=no_sampling, differs=_NOISE, unchecked=(0,)),
    ),
}
