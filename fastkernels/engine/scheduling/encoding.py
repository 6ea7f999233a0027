"""Requests of an encoder, and the scheduler that fills each step with whole requests."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from fastkernels.engine.inputs.images import Patches
from fastkernels.engine.scheduling.request import Status
from fastkernels.engine.scheduling.scheduler import AGING, QueueFull

if TYPE_CHECKING:
    from fastkernels.engine.scheduling.marks import Marks
    from fastkernels.engine.scheduling.segmentation import ClipPrompt, Concept

TASKS = ("embed", "token_embed", "classify", "token_classify", "maxsim", "detect", "segment")
CLIP_FRAMES = 4  # of a clip in a step: others run between the steps
ROLES = ("", "query", "document")


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of an encoder's request.

    task            'embed' (one vector), 'token_embed' (one vector per token), 'classify' (probabilities or a score),
                    'token_classify' (one weight per token), 'maxsim' (the score of a document for `query`), 'detect'
                    (boxes of objects) or 'segment' (boxes and masks of the objects that a prompt names)
    dimensions      the size of the vectors, for a model with Matryoshka embeddings
    use_activation  False: vectors without normalization, logits instead of probabilities
    role            'query' or 'document': the form of the text, for a model of late interaction
    query           vectors [n, D] float32 of a query, as 'token_embed' gives them, for the task 'maxsim'
    threshold       the least score of an object, from 0 to 1 (default: 0.5)
    max_detections  of an image, the best ones (default: all)
    mask_threshold  of 'segment': the probability above which a pixel belongs to an object (default: 0.5)
    masks           of 'segment': whether each object has a mask (default: True)
    semantic        of 'segment': also the mask of all pixels that belong to any such object (default: False)
    multimask_output  of 'segment' with marks: several masks that they can mean (default); False: the likeliest one
    """

    task: str = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None
    role: str = ""
    query: np.ndarray | None = field(default=None, compare=False)
    threshold: float | None = None
    max_detections: int | None = None
    mask_threshold: float | None = None
    masks: bool = True
    semantic: bool = False
    multimask_output: bool = True

    def __post_init__(self) -> None:
        if self.dimensions is not None and (not isinstance(self.dimensions, int) or self.dimensions < 1):
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions!r}")
        if self.task not in TASKS:
            raise ValueError(f"task {self.task!r} is not one of {', '.join(TASKS)}")
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is not 'query' or 'document'")
        for name in ("threshold", "max_detections"):
            if getattr(self, name) is not None and self.task not in ("detect", "segment"):
                raise ValueError(f"{name} belongs to the task 'detect' or 'segment', got task {self.task!r}")
        own = (("mask_threshold", None), ("masks", True), ("semantic", False), ("multimask_output", True))
        for name, default in own:
            value = getattr(self, name)
            if value is not default and self.task != "segment":
                raise ValueError(f"{name} belongs to the task 'segment', got task {self.task!r}")
            if default is not None and type(value) is not bool:
                raise ValueError(f"{name} must be True or False, got {value!r}")
        for name in ("threshold", "mask_threshold"):
            least = getattr(self, name)
            if least is not None and (type(least) not in (int, float) or not 0 <= least <= 1):
                raise ValueError(f"{name} must be a number from 0 to 1, got {least!r}")
        most = self.max_detections
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_detections must be an integer, at least 1, got {most!r}")
        if (self.query is not None) != (self.task == "maxsim"):
            raise ValueError(f"query belongs to the task 'maxsim', got task {self.task!r}")


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
class PoolingOutput:
    """data: float32 [H] for task 'embed', [tokens, H] for 'token_embed', [labels] for 'classify', [1] for a score."""

    data: np.ndarray

    @property
    def embedding(self) -> list[float]:
        """`data` as Python floats."""
        return self.data.tolist()

    @property
    def probs(self) -> list[float]:
        """`data` of the task 'classify' as Python floats."""
        return self.data.tolist()

    @property
    def score(self) -> float:
        """`data` of one number."""
        return float(self.data.item())


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
