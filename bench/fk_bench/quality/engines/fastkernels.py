"""Our own engine: tokens are forced by its sampler; an embedder encodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fastkernels import LLM, SamplingParams
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampler_state import LogprobsTensors, NewRow, SamplePlan
from fastkernels.engine.sampling.token_masks import DeviceMasks
from fk_bench.quality.forced import Progress, step

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
        drawn: torch.Tensor | None = None, masks: DeviceMasks | None = None,
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:  # fmt: skip
        forced = [(i, self.requests[slot]) for i, slot in enumerate(slots.tolist()) if slot in self.requests]
        if not forced:
            return super().__call__(logits, slots, offsets, plan, drawn, masks)
        changed = logits.to(torch.float32, copy=True)
        step(changed, forced)
        return changed.argmax(-1), None


class Engine:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.encodes = options["family"] != "text"
        self.target = LLM(
            model, skip_tokenizer_init=True, device=device, dtype=options["dtype"], max_num_seqs=options["batch"],
            max_model_len=options["longest"], max_num_batched_tokens=options["tokens"], **options["engine_args"],
        )  # fmt: skip
        if not self.encodes:
            sampler: Any = self.target.llm_engine.runner.sampler
            sampler.__class__, sampler.requests = Forced, {}

    def decode(
        self, prompts: list[list[int]], tasks: list[dict[str, Any]], staggered: bool = False
    ) -> list[list[int]]:
        """Return the generated tokens, which must be each task's own.

        staggered: half of the prompts arrive two steps later, so that a step has prompts and decodes.
        """
        self.target.llm_engine.reset_prefix_cache()  # no prefix cache: every run computes the prompts
        _tasks.clear()
        _tasks.update(enumerate(tasks))
        params = [  # an empty bias keeps the token choice out of the graph
            SamplingParams(
                temperature=0, max_tokens=len(task["tokens"]), ignore_eos=True, detokenize=False, seed=i,
                logit_bias={0: 0.0},
            )
            for i, task in enumerate(tasks)
        ]  # fmt: skip
        if staggered:
            found = self._staggered(prompts, params)
        else:
            outputs = self.target.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            found = [list(o.outputs[0].token_ids) for o in outputs]
        _tasks.clear()
        return found

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
