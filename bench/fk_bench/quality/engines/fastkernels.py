"""Our own engine: tokens are forced by its sampler, or one mask after the other; an embedder encodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastkernels import LLM, SamplingParams, UnmaskParams
from fastkernels.engine.execution.runners.unmask import Unmask, UnmaskStep
from fastkernels.engine.sampling.draft_places import DraftPlaces
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampler_state import LogprobsTensors, SamplePlan
from fastkernels.engine.sampling.token_masks import DeviceMasks
from fastkernels.engine.steps.unmask_step import UnmaskInput
from fk_bench.quality.forced import Progress, step, store

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
        self, logits: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, plan: SamplePlan,
        drawn: torch.Tensor | None = None, masks: DeviceMasks | None = None, places: DraftPlaces | None = None,
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:  # fmt: skip
        forced = [(i, self.requests[slot]) for i, slot in enumerate(slots.tolist()) if slot in self.requests]
        if not forced:
            return super().__call__(logits, slots, offsets, plan, drawn, masks, places)
        changed = logits.to(torch.float32, copy=True)
        step(changed, forced)
        return changed.argmax(-1), None


class ForcedUnmask(Unmask):
    """An Unmask that fills in the task's tokens from left to right, for requests with a task."""

    requests: dict[int, Progress]

    def launch(self, step: UnmaskInput) -> UnmaskStep:
        self.first = {
            int(seed): int(row) for seed, row in zip(*np.unique(step.seeds, return_index=True), strict=True)
        }
        return super().launch(step)

    def draw(self, logits: torch.Tensor, step: UnmaskInput, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        kept = logits.clone()
        tokens, logprobs = super().draw(logits, step, part)
        for seed, row in self.first.items():
            if seed not in _tasks:
                continue
            own = np.flatnonzero(step.seeds[part] == seed)
            logprobs[torch.from_numpy(own)] = -torch.inf
            if part.start <= row < part.start + len(kept):
                at = row - part.start
                progress = self.requests.setdefault(seed, Progress(_tasks[seed]))
                store(kept[at][None], [progress.task], progress.done)
                tokens[at], logprobs[at] = progress.task["tokens"][progress.done], 0.0
                progress.done += 1
        return tokens, logprobs


class Engine:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.encodes = options["family"] != "text"
        self.target = LLM(
            model, skip_tokenizer_init=True, device=device, dtype=options["dtype"], max_num_seqs=options["batch"],
            max_model_len=options["longest"], max_num_batched_tokens=options["tokens"], **options["engine_args"],
        )  # fmt: skip
        engine = self.target.llm_engine
        if not self.encodes:
            forced: Any = engine.runner if engine.kind == "Unmask" else engine.runner.sampler
            forced.__class__, forced.requests = (ForcedUnmask if engine.kind == "Unmask" else Forced), {}

    def decode(
        self, prompts: list[list[int]], tasks: list[dict[str, Any]], staggered: bool = False
    ) -> list[list[int]]:
        """Return the generated tokens, which must be each task's own.

        staggered: half of the prompts arrive two steps later, so that a step has prompts and decodes.
        """
        self.target.llm_engine.reset_prefix_cache()  # no prefix cache: every run computes the prompts
        _tasks.clear()
        _tasks.update(enumerate(tasks))
        params = [self._params(i, len(task["tokens"])) for i, task in enumerate(tasks)]
        if staggered:
            found = self._staggered(prompts, params)
        else:
            outputs = self.target.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            found = [list(o.outputs[0].token_ids) for o in outputs]
        _tasks.clear()
        return found

    def _params(self, seed: int, count: int) -> SamplingParams:
        own: dict[str, Any] = {"ignore_eos": True, "detokenize": False, "seed": seed, "max_tokens": count}
        if self.target.llm_engine.kind == "Unmask":
            self.target.llm_engine.runner.requests.clear()
            return UnmaskParams(block_length=count, block_cache="dual", **own)
        return SamplingParams(
            temperature=0, logit_bias={0: 0.0}, **own
        )  # a bias: tokens are chosen outside graphs

    def _staggered(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        engine, done = self.target.llm_engine, dict[str, list[int]]()
        half = -(-len(prompts) // 2)
        arrive = {0: range(half), 2: range(half, len(prompts))}
        for now in itertools.count():
            for i in arrive.get(now, ()):
                engine.add_request(str(i), prompts[i], params[i])
            if engine.has_unfinished_requests():
                finished = [o for o in engine.step() if o.finished]
                done |= {o.request_id: list(o.outputs[0].token_ids) for o in finished}
            elif now >= max(arrive):
                break
        return [done[str(i)] for i in range(len(prompts))]

    def encode(self, texts: list[list[int]]) -> torch.Tensor:
        """[n, D]: one vector a text."""
        outputs = self.target.embed([{"prompt_token_ids": t} for t in texts], use_tqdm=False)
        return torch.tensor([o.outputs.embedding for o in outputs])

    def close(self) -> None:
        self.target.shutdown()
