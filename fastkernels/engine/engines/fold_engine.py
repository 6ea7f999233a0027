"""The engine of structure prediction: chains in, structures out, one request at a time."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from fastkernels.engine.engines.budget_engine import BudgetEngine
from fastkernels.engine.engines.engine import Checkpoint
from fastkernels.engine.execution.runners.fold import TURN, FoldInput, FoldStart
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.scheduling.denoising import SEEDS
from fastkernels.engine.scheduling.encoding import BudgetScheduler
from fastkernels.engine.scheduling.folding import MOST_RECYCLES, FoldParams, FoldRequest, FoldRequestOutput


class FoldEngine(BudgetEngine):
    """See Engine. A step runs the trunk of a request, or some of its denoising steps.

    One request runs at a time: a structure of a few hundred residues fills a GPU, and holds gigabytes.
    """

    kind = "Fold"
    request_class = FoldRequest
    scheduler: BudgetScheduler[FoldRequest]
    requests: dict[str, FoldRequest]

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None):
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} is not supported for structure prediction, only 1"
            )
        super().__init__(config, checkpoint)

    def _start(self) -> None:
        super()._start()
        self.scheduler = BudgetScheduler(1, self.config.max_num_batched_tokens, self.config.max_waiting)
        self._seeds = random.Random(self.config.seed)
        self._drops: list[str] = []

    def make_request(
        self, request_id: str, prompt: Any, params: FoldParams | None = None, priority: int = 0
    ) -> FoldRequest:
        """See Engine. prompt: {"chains": ...} or {"features": ...}, see models/common/folding/features.py.

        Raises ValueError, whose message begins with "the input" or the parameter.
        """
        params = params or FoldParams()
        if not isinstance(params, FoldParams):
            raise ValueError(f"a model of structures takes FoldParams, got {type(params).__name__}")
        model, config = self.runner.model, self.config
        samples = params.num_samples or min(model.num_samples, config.max_images)
        if samples > config.max_images:
            raise ValueError(f"num_samples must be at most {config.max_images} (max_images), got {samples}")
        recycles = model.num_recycles if params.num_recycles is None else params.num_recycles
        if recycles > MOST_RECYCLES:
            raise ValueError(f"num_recycles must be at most {MOST_RECYCLES}, got {recycles}")
        steps = params.num_steps or model.num_steps
        if steps > (most := max(config.max_steps, model.num_steps)):
            raise ValueError(f"num_steps must be at most {most} (max_steps), got {steps}")
        features = model.read(prompt, self.max_model_len)
        seed = self._seeds.randrange(SEEDS) if params.seed is None else params.seed
        turns = 1 + -(-steps // TURN)
        return FoldRequest(request_id, features, params, samples, recycles, steps, seed, turns, priority)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[FoldRequestOutput]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._drops += [i for i in dict.fromkeys(ids) if i in self.requests]
        super().abort_request(ids)
        if not self.requests:  # no step would tell the runner
            drops, self._drops = self._drops, []
            self.executor.launch(FoldInput((), (), drops))
        return []

    def abort_all(self) -> None:
        self._drops += self.requests
        super().abort_all()

    def step(self) -> list[FoldRequestOutput]:
        batch = list(self.scheduler.schedule())
        if not batch:
            return []
        drops, self._drops = self._drops, []
        starts = [
            FoldStart(r.request_id, r.features, r.samples, r.recycles, r.steps, r.seed)
            for r in batch
            if r.step == 0
        ]
        found = self._launch(FoldInput(starts, [r.request_id for r in batch if r.step], drops))
        for request in batch:
            request.step += 1
        ended = [r for r in batch if r.request_id in found]
        self._remove(ended)
        self.stats.prompt_tokens += sum(r.num_tokens for r in ended)
        self.stats.encoded += ended
        return [
            FoldRequestOutput(
                r.request_id, found[r.request_id], r.features.places, r.seed, r.steps, r.num_tokens
            )
            for r in ended
        ]
