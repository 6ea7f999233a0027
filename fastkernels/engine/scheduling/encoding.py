"""Requests of an encoder, and the scheduler that fills each step with whole requests."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from fastkernels.engine.inputs.images import Patches
from fastkernels.engine.objects.marks import Marks
from fastkernels.engine.objects.segmentation import ClipPrompt, Concept
from fastkernels.engine.sampling.pooling import PoolingOutput, PoolingParams
from fastkernels.engine.scheduling.request import Status
from fastkernels.engine.scheduling.scheduler import AGING, QueueFull


@dataclass(eq=False)
class EncodeRequest:
    """One sequence, or the patches of one image or video, to encode. A lower priority number goes first.

    seen, kept: of retrieval.Shaped; None: all tokens. concept: what to find in the image, for the task 'segment'.
    clip: the frames and texts of a clip, of which `done` frames are computed; a step takes CLIP_FRAMES of them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: PoolingParams
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    status: Status = Status.WAITING
    scheduled_time: float | None = None
    image: Patches | None = None
    token_type_ids: Sequence[int] | None = None
    seen: int | None = None
    kept: np.ndarray | None = None
    concept: Concept | Marks | None = None
    clip: ClipPrompt | None = None
    done: int = 0
    streams_deltas = False  # one output, at the end

    @property
    def num_tokens(self) -> int:
        """Of a sequence or an image; of a frame of a clip, whose frames follow each other."""
        if self.clip is not None:
            return self.clip.tokens
        return len(self.prompt_token_ids) if self.image is None else self.image.tokens

    @property
    def all_tokens(self) -> int:
        """`num_tokens`, of all frames of a clip."""
        return self.num_tokens if self.clip is None else self.num_tokens * len(self.clip)

    @property
    def num_features(self) -> int:
        """The number of hidden states that the model returns."""
        return len(self.prompt_token_ids) if self.image is None else self.image.features


@dataclass
class PoolingRequestOutput:
    """The result of a request. Names are vLLM's. num_tokens: of the sequence, also of an image's or video's.

    kept: of retrieval.Shaped
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_tokens: int = 0
    kept: np.ndarray | None = None

    @property
    def kept_token_ids(self) -> list[int]:
        """The token ids of the rows of `outputs.data`, in a task with a row for each token."""
        ids = self.prompt_token_ids
        return ids if self.kept is None else [i for i, kept in zip(ids, self.kept, strict=True) if kept]


R = TypeVar("R", bound=Any)  # with arrival, priority, status, scheduled_time and num_tokens


class BudgetScheduler(Generic[R]):
    """Orders requests by arrival and priority, as Scheduler does.

    A request runs until it is removed, and its tokens are part of the budget of each step. One with more tokens than
    the budget runs alone.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_waiting: int):
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self.running: list[R] = []
        self._waiting: list[tuple[float, int, R]] = []  # a heap; removed requests stay until popped
        self._count = 0

    def __len__(self) -> int:
        return self.num_waiting + len(self.running)

    def check_room(self, num: int = 1) -> None:
        """Raise QueueFull if `num` more requests may not wait."""
        if self.num_waiting + num > self.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting; the limit is {self.max_waiting}")

    def add(self, request: R) -> None:
        """Queue a request. Raises QueueFull."""
        self.check_room()
        self._push(request)

    def _push(self, request: R) -> None:
        self._count += 1  # equal keys keep their order
        heapq.heappush(self._waiting, (request.arrival + request.priority * AGING, self._count, request))
        self.num_waiting += 1

    def schedule(self) -> list[R]:
        """The requests of the next step, which are running from here on."""
        budget = self.max_num_batched_tokens - sum(r.num_tokens for r in self.running)
        while self._waiting and len(self.running) < self.max_num_seqs:
            request = self._waiting[0][2]
            if request.status is Status.WAITING:
                if request.num_tokens > budget and self.running:
                    break
                budget -= request.num_tokens
                request.status, request.scheduled_time = Status.RUNNING, time.monotonic()
                self.running.append(request)
                self.num_waiting -= 1
            heapq.heappop(self._waiting)
        return self.running

    def keep(self, some: list[R], others: Sequence[R]) -> list[R]:
        """Let `others` wait again, and give no later step more tokens than `some`, which this returns."""
        self.max_num_batched_tokens = sum(r.num_tokens for r in some)
        for request in others:
            request.status = Status.WAITING
            self._push(request)
        self.running = [r for r in self.running if r.status is Status.RUNNING]
        return some

    def remove(self, requests: Iterable[R]) -> None:
        """Take requests out, finished or not."""
        for request in requests:
            if request.status is Status.WAITING:
                self.num_waiting -= 1
            request.status = Status.FINISHED
        self.running = [r for r in self.running if r.status is Status.RUNNING]

    def remove_all(self) -> None:
        """Take all requests out."""
        self.remove([*self.running, *(r for _, _, r in self._waiting if r.status is Status.WAITING)])
        self._waiting.clear()
