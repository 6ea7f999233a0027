"""quality.py: our own engine, with a sampler that forces tokens and compares logits (quality_record.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from experiments.quality.quality_record import Progress, step

from fastkernels import LLM, SamplingParams
from fastkernels.core import dispatch
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampler_state import LogprobsTensors, NewRow, SamplePlan
from fastkernels.engine.sampling.token_masks import DeviceMasks

_tasks: dict[int, dict[str, Any]] = {}  # by the request's seed


class Forced(Sampler):
    """A Sampler that takes the task's tokens for rows with a task."""

    requests: dict[int, Progress]

    def set_rows(self, rows: Sequence[NewRow]) -> None:
        super().set_rows(rows)
        for row in rows:
            self.requests.pop(row.slot, None)
            if row.params.seed in _tasks:
                self.requests[row.slot] = Progress(_tasks[row.params.seed])

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        plan: SamplePlan,
        drawn: torch.Tensor | None = None,
        masks: DeviceMasks | None = None,
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        forced = [(i, self.requests[slot]) for i, slot in enumerate(slots.tolist()) if slot in self.requests]
        if not forced:
            return super().__call__(logits, slots, offsets, plan, drawn, masks)
        changed = logits.to(torch.float32, copy=True)
        step(changed, forced)
        return changed.argmax(-1), None


class Engine:
    def __init__(self, model: str, options: dict[str, Any], top: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.top = top
        defaults: dict[str, Any] = {"device": device, "dtype": "bfloat16", "max_num_seqs": 32}
        self.target = LLM(model, skip_tokenizer_init=True, **{**defaults, **options})
        sampler: Any = self.target.llm_engine.runner.sampler
        sampler.__class__, sampler.requests = Forced, {}

    def version(self) -> str:
        import fastkernels

        return fastkernels.__version__

    def rows(self) -> list[dict[str, Any]]:
        """Return report rows of the ops that ran; no host modules are involved."""
        found = dispatch.counters()
        return [
            {"op": op, "modules": 0, "state": "active", **counted}
            for op, counted in found.items()
            if counted["calls"]
        ]

    def decode(self, prompts: list[list[int]], tasks: list[dict[str, Any]]) -> list[list[int]]:
        """Return the generated tokens, which must be each task's own."""
        self.target.llm_engine.blocks.reset_cache()  # no prefix cache: every run computes the prompts
        _tasks.clear()
        _tasks.update(enumerate(tasks))
        params = [
            SamplingParams(
                temperature=0, max_tokens=len(task["tokens"]), ignore_eos=True, detokenize=False, seed=i,
                logit_bias={0: 0.0},
            )
            for i, task in enumerate(tasks)
        ]  # fmt: skip
        # An empty bias keeps the token choice out of the graph.
        outputs = self.target.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        _tasks.clear()
        return [list(o.outputs[0].token_ids) for o in outputs]

    def prefill(self, texts: list[list[int]]) -> list[list[tuple[float, dict[int, float]]]]:
        """Return, for each token after the first, its log-probability and the most probable tokens with theirs."""
        self.target.llm_engine.blocks.reset_cache()
        params = SamplingParams(temperature=0, detokenize=False, max_tokens=1, prompt_logprobs=self.top)
        outputs = self.target.generate([{"prompt_token_ids": t} for t in texts], params, use_tqdm=False)
        found = []
        for output, text in zip(outputs, texts, strict=True):
            places = zip(output.prompt_logprobs[1:], text[1:], strict=True)
            found.append(
                [
                    (at[t].logprob, {token: e.logprob for token, e in at.items() if e.rank <= self.top})
                    for at, t in places
                ]
            )
        return found

    def close(self) -> None:
        self.target.shutdown()
