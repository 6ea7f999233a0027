"""Base of the engines with a BudgetScheduler: encoders, recommenders, scenes and diffusion pipelines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from fastkernels.engine.engines.engine import Engine
from fastkernels.engine.scheduling.encoding import BudgetScheduler

log = logging.getLogger("fastkernels")


class RequestDoesNotFit(RuntimeError):
    """A request has ended, since the device has no memory for it alone; other requests go on."""

    def __init__(self, request_id: str, message: str):
        super().__init__(message)
        self.request_id = request_id


class BudgetEngine(Engine):
    """See Engine. request_class: what make_request returns."""

    fitting = 0  # most tokens of a step that the device had memory for
    each = 1  # tokens of a request that count as one of max_num_batched_tokens

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

    def _compute(
        self, batch: list[Any], step_of: Callable[[list[Any]], Any]
    ) -> tuple[list[Any], Sequence[Any]]:
        """The results of a batch's first requests: of as many as the device has memory for. The others wait again.

        Later steps are as small. step_of: a step of requests, which changes nothing that a second try reads. Raises
        RequestDoesNotFit, and other errors, after which no request is left.
        """
        failed = 0  # tokens of the last try
        while True:
            try:
                found = self.executor.launch(step_of(batch)).result()
                break
            except torch.OutOfMemoryError as error:
                if self.config.num_ranks > 1:  # which are out of step
                    self.abort_all()
                    raise
                why = str(error).partition("\n")[0]
            except BaseException:
                self.abort_all()
                raise
            # Outside of the handler, whose error holds the step's tensors
            if self.runner.device.type == "cuda":
                torch.cuda.empty_cache()
            failed = sum(r.num_tokens for r in batch)
            if len(batch) == 1:
                raise self._too_large(batch[0], why)
            batch = self.scheduler.keep(batch[: len(batch) // 2], batch[len(batch) // 2 :])
        tokens = sum(r.num_tokens for r in batch)
        self.fitting = max(self.fitting, tokens)
        if failed:
            log.warning(
                "a step of %d tokens needs more memory than the GPU has; one of %d requests with %d tokens fits, and"
                " later steps have at most as many: start with max_num_batched_tokens=%d, or free memory",
                failed, len(batch), tokens, max(1, tokens // self.each),
            )  # fmt: skip
        return batch, found

    def _too_large(self, request: Any, why: str) -> RequestDoesNotFit:
        """End a request that does not fit alone."""
        self._remove([request])
        self.stats.aborted += 1
        most = f"; the largest step so far had {self.fitting}" if self.fitting else ""
        return RequestDoesNotFit(
            request.request_id,
            f"the request needs more memory than the GPU has: it counts as {request.num_tokens} tokens{most}. Send a"
            f" smaller one, or free memory used by other processes ({why})",
        )

    def _remove(self, requests: Sequence[Any]) -> None:
        """Take requests out, finished or not."""
        self.scheduler.remove(requests)
        for request in requests:
            del self.requests[request.request_id]
