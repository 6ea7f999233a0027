"""Base of the engines with a BudgetScheduler: encoders, recommenders, scenes and diffusion pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from fastkernels.engine.engines.engine import Engine
from fastkernels.engine.scheduling.encoding import BudgetScheduler


class BudgetEngine(Engine):
    """See Engine. request_class: what make_request returns."""

    request_class: ClassVar[type]
    scheduler: BudgetScheduler[Any]

    def _start(self) -> None:
        config = self.config
        self.scheduler = BudgetScheduler(
            config.max_num_seqs, config.max_num_batched_tokens, config.max_waiting
        )

    def check_room(self, requests: Sequence[Any]) -> None:
        self.scheduler.check_room(len(requests))

    def has_room(self, request: Any) -> bool:
        return self.scheduler.num_waiting < self.config.max_waiting

    def add_request(self, request_id: str, prompt: Any, params: Any = None, priority: int = 0) -> None:
        if request_id in self.requests:
            raise ValueError(f"there is already a request {request_id!r}")
        if not isinstance(prompt, self.request_class):
            prompt = self.make_request(request_id, prompt, params, priority)
        self.scheduler.add(prompt)
        self.requests[request_id] = prompt

    def abort_request(self, request_ids: str | Iterable[str]) -> list[Any]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        found = [self.requests[i] for i in dict.fromkeys(ids) if i in self.requests]
        self._remove(found)
        self.stats.aborted += len(found)
        return []

    def abort_all(self) -> None:
        self.scheduler.remove_all()
        self.stats.aborted += len(self.requests)
        self.requests.clear()

    def has_unfinished_requests(self) -> bool:
        return len(self.scheduler) > 0

    def _launch(self, step: Any) -> Any:
        """The result of a step. After an exception no request is left."""
        try:
            return self.executor.launch(step).result()
        except BaseException:
            self.abort_all()
            raise

    def _remove(self, requests: Sequence[Any]) -> None:
        """Take requests out, finished or not."""
        self.scheduler.remove(requests)
        for request in requests:
            del self.requests[request.request_id]
