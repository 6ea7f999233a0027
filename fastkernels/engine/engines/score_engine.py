"""The engine of recommenders: samples in, one forward pass, scores out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkernels.engine.engines.budget_engine import BudgetEngine
from fastkernels.engine.engines.engine import Checkpoint
from fastkernels.engine.execution.runners.score import ScoreInput
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.pooling import PoolingOutput, PoolingParams
from fastkernels.engine.scheduling.encoding import BudgetScheduler, EncodeRequest, PoolingRequestOutput


@dataclass(eq=False)
class ScoreRequest(EncodeRequest):
    """One sample, as the model's `read` made it, to score."""

    sample: Any = None

    @property
    def num_tokens(self) -> int:
        """Its share of a step: the number of its ids."""
        return max(self.sample.size, 1)


@dataclass
class ScoreOutput(PoolingOutput):
    """data: scores [n] float32; items: the ids that they belong to, [n] int64, if the model has chosen them."""

    items: np.ndarray | None = None

    @property
    def scores(self) -> list[float]:
        """`data` as Python floats."""
        return self.data.tolist()

    @property
    def item_ids(self) -> list[int] | None:
        """`items` as Python integers."""
        return None if self.items is None else self.items.tolist()


class ScoreEngine(BudgetEngine):
    """See Engine. A step scores as many waiting requests as max_num_seqs and max_num_batched_tokens allow.

    So many ids as the runner's `ids_per_token` count as a token.
    """

    kind = "Score"
    served, counted = (
        "recommenders",
        "ids",
    )  # words of messages: what runs, and what a request has a number of
    limit = "max_num_batched_tokens"
    request_class = ScoreRequest
    scheduler: BudgetScheduler[ScoreRequest]
    requests: dict[str, ScoreRequest]

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None):
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} is not supported for {self.served}, only 1"
            )
        super().__init__(config, checkpoint)

    def _start(self) -> None:
        config, self.each = self.config, self.runner.ids_per_token
        self.scheduler = BudgetScheduler(
            config.max_num_seqs, self.each * config.max_num_batched_tokens, config.max_waiting
        )

    def make_request(
        self, request_id: str, prompt: Any, params: PoolingParams | None = None, priority: int = 0
    ) -> ScoreRequest:
        """See Engine. prompt: a sample, as the model's `read` documents it. params: of the task 'classify'."""
        params = params or PoolingParams("classify")
        if not isinstance(params, PoolingParams) or params.task != "classify":
            raise ValueError(f"{self.served} take PoolingParams('classify'), got {params!r}")
        request = ScoreRequest(request_id, None, [], params, priority, sample=self.runner.model.read(prompt))
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"the input has {request.num_tokens} {self.counted}, and a request may have {self.max_model_len}"
                f" ({self.limit})"
            )
        return request

    def step(self) -> list[PoolingRequestOutput]:
        batch: list[Any] = list(self.scheduler.schedule())
        if not batch:
            return []
        batch, found = self._compute(
            batch,
            lambda some: ScoreInput(
                [r.sample for r in some], [r.params.use_activation is not False for r in some]
            ),
        )
        self._remove(batch)
        self.stats.prompt_tokens += sum(r.num_tokens for r in batch)
        self.stats.encoded += batch
        return [
            PoolingRequestOutput(r.request_id, None, [], ScoreOutput(*pair), num_tokens=r.num_tokens)
            for r, pair in zip(batch, found, strict=True)
        ]
