"""The common part of tests of speculative decoding: a small engine, prompts whose tokens recur, and results."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.drafts.drafting import Drafter
from fastkernels.engine.options.speculation import DraftCounts

SMALL: dict[str, Any] = {
    "device": "cpu", "num_blocks": 40, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 48,
    "max_model_len": 96,
}  # fmt: skip
ALWAYS: dict[str, Any] = {"disable_by_batch_size": None}  # drafts at every size, whatever steps take


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of few different tokens, so that some occur twice."""
    rng = random.Random(seed)
    return [[rng.randrange(4, 16) for _ in range(rng.randrange(3, 50))] for _ in range(count)]


def params(i: int, **given: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.8 * (i % 2), "max_tokens": 24, "ignore_eos": True, "seed": i, **given}
    )


def results(llm: LLM, given: Any, each: Any) -> list[Any]:
    outputs = llm.generate(given, each, use_tqdm=False)
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


def counts(llm: LLM) -> DraftCounts:
    return llm.llm_engine.scheduler.draft_counts


def propose(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]]) -> None:
    """Let draft models propose tokens that follow in `texts`, in trees at random nodes, and their own elsewhere."""
    rng = random.Random(1)
    original = Drafter.chain

    def chain(self: Drafter, rows: int, longest: int, most: int = 0) -> torch.Tensor:
        drafts = original(self, rows, longest, most)
        children = [[i + 1] for i in range(self.count)] if self.tree is None else self.tree.children
        for row in range(rows):
            token, at = int(self._rows.token[row]), int(self._rows.at[row]) + 1
            left = [t for t in texts if len(t) > at and t[at] == token]
            text, node = rng.choice(left) if left else [], 0
            while (
                (at := at + 1) < len(text) and node < len(children) and children[node] and rng.random() < 0.8
            ):
                node = rng.choice(children[node])
                siblings = next(kids for kids in children if node in kids)
                if text[at] not in {int(drafts[row, kid - 1]) for kid in siblings}:
                    drafts[row, node - 1] = text[at]
        if self.tree is None:
            self.held.drafts[self._rows.slot[:rows]] = drafts
        return drafts

    monkeypatch.setattr(Drafter, "chain", chain)
