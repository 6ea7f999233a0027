"""The engine of scenes: cameras in, images out."""

from __future__ import annotations

from typing import Any

from fastkernels.engine.engines.budget_engine import BudgetEngine
from fastkernels.engine.engines.engine import Checkpoint
from fastkernels.engine.execution.runners.render import RenderInput
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.scheduling.encoding import BudgetScheduler
from fastkernels.engine.scheduling.rendering import RenderParams, RenderRequest, RenderRequestOutput
from fastkernels.models.common.interfaces import camera

MAX_PIXELS = 4096 * 4096


class RenderEngine(BudgetEngine):
    """See Engine. A step renders as many cameras as max_num_seqs and, of tiles, max_num_batched_tokens allow."""

    kind = "Render"
    request_class = RenderRequest
    scheduler: BudgetScheduler[RenderRequest]
    requests: dict[str, RenderRequest]

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None):
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} is not supported for scenes, only 1"
            )
        super().__init__(config, checkpoint)

    def _start(self) -> None:
        super()._start()
        self.max_pixels: int = self.config.max_pixels or MAX_PIXELS

    def make_request(
        self, request_id: str, prompt: Any, params: RenderParams | None = None, priority: int = 0
    ) -> RenderRequest:
        """See Engine. prompt: a camera, as camera.read documents it."""
        params = params or RenderParams()
        if not isinstance(params, RenderParams):
            raise ValueError(f"a scene takes RenderParams, got {type(params).__name__}")
        return RenderRequest(request_id, camera.read(prompt, self.max_pixels), params, priority)

    def step(self) -> list[RenderRequestOutput]:
        batch = list(self.scheduler.schedule())
        if not batch:
            return []
        batch, found = self._compute(
            batch, lambda some: RenderInput([r.camera for r in some], [r.params.raw for r in some])
        )
        self._remove(batch)
        self.stats.images += batch
        return [
            RenderRequestOutput(r.request_id, array, num_tokens=r.num_tokens)
            for r, array in zip(batch, found, strict=True)
        ]
