"""The loop itself: schedule, launch, collect. It knows token ids and nothing of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from fastkernels.engine.execution.step import Launcher, Pending, StepOutput
from fastkernels.engine.scheduling.outputs import append_token
from fastkernels.engine.scheduling.request import Request, Status
from fastkernels.engine.scheduling.scheduler import Batch, Scheduler
from fastkernels.engine.scheduling.step_input import make_step


@dataclass(frozen=True)
class StepResult:
    """A step that is done. `news` are (row, request) of those that have a new token; others of the batch computed a
    part of their prompt, or had ended before the step was done."""

    batch: Batch
    output: StepOutput
    news: list[tuple[int, Request]]


class EngineCore:
    """depth: steps under way at once. With 2, a step is scheduled and sent out while the one before it runs: its tokens
    are not known then, and a request that they end computes one token too many, which is dropped."""

    def __init__(self, scheduler: Scheduler, executor: Launcher, depth: int = 1):
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self._under_way: deque[tuple[Batch, Pending]] = deque()

    @property
    def busy(self) -> bool:
        return len(self.scheduler) > 0 or bool(self._under_way)

    def step(self) -> StepResult | None:
        """Launch the next batch and wait for the oldest; None if there is none, or it is left running."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self._under_way.append((batch, self.executor.launch(make_step(batch))))
        if not self._under_way or (batch is not None and len(self._under_way) < self.depth):
            return None
        oldest, pending = self._under_way.popleft()
        return self._collect(oldest, pending.result())

    def end(self, requests: Iterable[Request]) -> None:
        """Take unfinished requests out. Steps under way may still compute for them: what they give is dropped."""
        self.scheduler.remove(requests)

    def reset(self) -> None:
        """After a step that failed: everything is taken out, and what is in the cache is forgotten."""
        self._under_way.clear()
        self.scheduler.remove_all()
        self.scheduler.blocks.reset_cache()

    def _collect(self, batch: Batch, output: StepOutput) -> StepResult:
        news, ended = [], []
        tokens = output.token_ids.tolist()
        for row, request in enumerate(batch.requests):
            if batch.offsets[row] >= 0 and request.status is not Status.FINISHED:
                request.num_inflight -= 1
                append_token(request, tokens[row])
                news.append((row, request))
                if request.finish_reason is not None:
                    ended.append(request)
        if ended:
            self.scheduler.remove(ended)
        return StepResult(batch, output, news)
