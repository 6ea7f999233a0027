"""Greedy stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .step import NewRow


@dataclass(frozen=True)
class LogprobsTensors:
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True)
class SamplePlan:
    rows: int


class Sampler:
    def __init__(self, device: torch.device, vocab_size: int, max_num_seqs: int):
        self.device = device

    def set_rows(self, rows: Sequence[NewRow]) -> None:
        pass

    def plan(self, slots: np.ndarray, offsets: np.ndarray) -> SamplePlan:
        return SamplePlan(len(slots))

    def __call__(
        self, logits: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, plan: SamplePlan
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        return torch.argmax(logits, dim=-1), None

    def prompt_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, k: int) -> LogprobsTensors:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        chosen = logprobs.gather(1, targets[:, None])
        top, ids = logprobs.topk(k, dim=-1)
        ranks = (logprobs > chosen).sum(1) + 1
        return LogprobsTensors(torch.cat((targets[:, None], ids), 1), torch.cat((chosen, top), 1), ranks)
