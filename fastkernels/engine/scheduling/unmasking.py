"""Requests of a diffusion language model: their masks, which of them a step fills in, and the steps' batches.

A request computes all of its tokens in the first step of a block. In the later steps its block_cache decides which
tokens are computed again: all, those from the block on, or those of the block. A request holds cache blocks for all of
its tokens from its first step to its end, so that no request is ever preempted.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastkernels.engine.cache.blocks import BlockManager
from fastkernels.engine.sampling.unmask_params import UnmaskParams
from fastkernels.engine.scheduling.request import Request, Status
from fastkernels.engine.scheduling.scheduler import AGING, QueueFull
from fastkernels.engine.steps.unmask_step import UnmaskInput, UnmaskOutput

_WORD = 1 << 64


@dataclass(eq=False)
class Canvas:
    """The tokens of one request, with masks in place of those that are not chosen.

    tokens, masked  [L]: prompt and answer; start: of the block in work; step: within this block
    blocks          of the cache; computed: how many steps it took part in, over all blocks
    """

    request: Request
    mask_token_id: int
    start: int = 0
    step: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        prompt, answer = self.request.prompt_token_ids, self.request.max_tokens
        self.params: UnmaskParams = self.request.params  # type: ignore[assignment]
        self.plan = self.params.plan(answer)
        self.tokens = np.array([*prompt, *[self.mask_token_id] * answer], np.int64)
        self.masked = np.arange(len(self.tokens)) >= len(prompt)
        self.start = len(prompt)

    @property
    def end(self) -> int:
        """The end of the block in work."""
        return self.start + self.plan.block_length

    @property
    def cached(self) -> bool:
        return self.params.block_cache != "none"

    @property
    def guided(self) -> bool:
        return self.params.cfg_scale > 0

    @property
    def span(self) -> tuple[int, int]:
        """The tokens that its next step computes."""
        if self.step == 0 or not self.cached:
            return 0, len(self.tokens)
        return self.start, self.end if self.params.block_cache == "dual" else len(self.tokens)

    @property
    def cost(self) -> int:
        """The number of tokens that its next step computes."""
        first, last = self.span
        return (last - first) * (2 if self.guided else 1)

    def targets(self) -> np.ndarray:
        """The positions of the block's masks."""
        return self.start + np.flatnonzero(self.masked[self.start : self.end])

    def fill(self, tokens: np.ndarray, confidence: np.ndarray) -> list[int]:
        """Choose among the tokens for the block's masks, by their log-probabilities. Returns a finished block."""
        targets, params = self.targets(), self.params
        if params.remasking == "random":
            key = [self.request.seed % _WORD, self.computed]
            confidence = np.random.Generator(np.random.Philox(key=key)).random(len(targets))
        order = np.argsort(-confidence, kind="stable")
        if params.threshold is None:
            count = self.plan.counts[self.step]
        else:
            count = max(1, int((np.exp(confidence) >= params.threshold).sum()))
        chosen = order[:count]
        self.tokens[targets[chosen]] = tokens[chosen]
        self.masked[targets[chosen]] = False
        self.step += 1
        self.computed += 1
        if self.masked[self.start : self.end].any():
            return []
        done = self.tokens[self.start : self.end].tolist()
        self.start, self.step = self.end, 0
        return done


@dataclass
class UnmaskBatch:
    """The requests of one step. Those that compute all of their tokens come first."""

    canvases: list[Canvas]
    num_whole: int


class UnmaskScheduler:
    """Orders requests by arrival and priority, as Scheduler does, and keeps a step within its budget of tokens.

    Requests that a step has no room for go first in the next one.
    """

    prefix_queries = prefix_hits = num_preemptions = 0
    num_cache_tokens = None  # see Scheduler: requests without block_cache need no room
    speculation = None  # no draft model; see Scheduler

    def __init__(
        self, blocks: BlockManager, mask_token_id: int, max_num_seqs: int, max_num_batched_tokens: int,
        max_waiting: int,
    ):  # fmt: skip
        self.blocks, self.mask_token_id = blocks, mask_token_id
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self._canvases: dict[int, Canvas] = {}  # of running requests, by id; those that waited longest first
        # A heap; removed requests stay in it until they reach the top.
        self._waiting: list[tuple[tuple[float, str, int], Request]] = []

    def __len__(self) -> int:
        return self.num_waiting + len(self._canvases)

    @property
    def running(self) -> list[Request]:
        return [canvas.request for canvas in self._canvases.values()]

    @property
    def cache_usage(self) -> float:
        """Share of the cache's blocks in use, 0 to 1."""
        return self.blocks.usage

    def check_room(self, num: int = 1) -> None:
        """Raise QueueFull if `num` more requests may not wait."""
        if self.num_waiting + num > self.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting; the limit is {self.max_waiting}")

    def check_size(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Any request that the context has room for can run; see check_request."""

    def check_request(self, tokens: int, params: UnmaskParams) -> None:
        """Raise ValueError for a request of so many tokens that no step, or not the cache, has room for."""
        cost = tokens * (2 if params.cfg_scale else 1)
        if cost > self.max_num_batched_tokens:
            raise ValueError(
                f"cfg_scale doubles the tokens of a step: {tokens} tokens, prompt and max_tokens, need"
                f" max_num_batched_tokens={cost}, and this engine has {self.max_num_batched_tokens}"
            )
        room = self.blocks.num_usable * self.blocks.block_size
        if params.block_cache != "none" and tokens > room:
            raise ValueError(
                f"block_cache={params.block_cache!r} is for up to {room} tokens in this engine's cache, and prompt and"
                f" max_tokens have {tokens}: use block_cache='none', or increase num_blocks or kv_cache_memory"
            )

    def reset_cache(self) -> None:
        """Nothing outlives a request."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull."""
        self.check_room()
        request.status = Status.WAITING
        key = (request.arrival + request.priority * AGING, request.request_id, request.index)
        heapq.heappush(self._waiting, (key, request))
        self.num_waiting += 1

    def schedule(self) -> UnmaskBatch | None:
        """The next batch; None if there is nothing to run."""
        budget, chosen = self.max_num_batched_tokens, list[Canvas]()
        for canvas in self._canvases.values():
            if canvas.cost <= budget:
                chosen.append(canvas)
                budget -= canvas.cost
        while self._waiting and len(self._canvases) < self.max_num_seqs:
            request = self._waiting[0][1]
            if request.status is Status.WAITING:
                canvas = Canvas(request, self.mask_token_id)
                need = self.blocks.blocks_for(len(canvas.tokens)) if canvas.cached else 0
                if canvas.cost > budget or need > self.blocks.num_free:
                    break
                if need:
                    self.blocks.grow(canvas.blocks, len(canvas.tokens))
                budget -= canvas.cost
                request.status, request.scheduled_time = Status.RUNNING, time.monotonic()
                self._canvases[id(request)] = canvas
                self.num_waiting -= 1
                chosen.append(canvas)
            heapq.heappop(self._waiting)
        for canvas in chosen:  # behind those that are not in this step
            self._canvases[id(canvas.request)] = self._canvases.pop(id(canvas.request))
        whole = [c for c in chosen if c.span == (0, len(c.tokens))]
        rest = [c for c in chosen if c.span != (0, len(c.tokens))]
        return UnmaskBatch([*whole, *rest], len(whole)) if chosen else None

    def remove(self, requests: Iterable[Request]) -> None:
        """Take requests out, finished or not, and free their blocks."""
        for request in requests:
            if request.status is Status.WAITING:
                self.num_waiting -= 1
            elif request.status is Status.RUNNING:
                self.blocks.free(self._canvases.pop(id(request)).blocks)
            request.status = Status.FINISHED
        if len(self._waiting) > 2 * self.num_waiting + 64:
            self._waiting = [item for item in self._waiting if item[1].status is Status.WAITING]
            heapq.heapify(self._waiting)

    def remove_all(self) -> None:
        self.remove([*self.running, *(r for _, r in self._waiting)])
        self._waiting.clear()


def make_step(batch: UnmaskBatch, block_size: int) -> UnmaskInput:
    """The input of the ranks. A guided request has a second sequence, with a masked prompt."""
    rows: list[tuple[Canvas, bool]] = []  # (canvas, whether its prompt is masked)
    for canvas in batch.canvases[: batch.num_whole]:
        rows += [(canvas, False), (canvas, True)] if canvas.guided else [(canvas, False)]
    num_whole = len(rows)
    rows += [(canvas, False) for canvas in batch.canvases[batch.num_whole :]]
    ids, positions, slots, lens = [], [], [], []
    keys = [np.empty(0, np.int64)]
    starts: dict[tuple[int, bool], int] = {}  # of a row's tokens
    at = 0
    widest = max(len(canvas.blocks) for canvas, _ in rows)
    table = np.zeros((len(rows), widest), np.int32)
    for row, (canvas, blind) in enumerate(rows):
        first, last = canvas.span
        inside = np.arange(first, last)
        tokens = canvas.tokens[first:last]
        if blind:
            tokens = np.where(inside < len(canvas.request.prompt_token_ids), canvas.mask_token_id, tokens)
        table[row, : len(canvas.blocks)] = canvas.blocks
        ids.append(tokens)
        positions.append(inside)
        if canvas.cached:
            all_slots = _slots(canvas, block_size)
            slots.append(all_slots[first:last])
            if row >= num_whole:
                keys.append(all_slots)
        else:
            slots.append(np.full(len(inside), -1))
        starts[id(canvas), blind] = at - first
        lens.append(last - first)
        at += last - first
    targets = [canvas.targets() for canvas in batch.canvases]
    counts = np.array([len(t) for t in targets])
    places = [t + starts[id(c), False] for c, t in zip(batch.canvases, targets, strict=True)]
    blinds = [
        t + starts[id(c), True] if c.guided else np.full(len(t), -1)
        for c, t in zip(batch.canvases, targets, strict=True)
    ]
    # The noise of a draw is of the seed, the request's step and the position.
    offsets = [t + c.computed * len(c.tokens) for c, t in zip(batch.canvases, targets, strict=True)]

    def each(values: Sequence[float], dtype: type) -> np.ndarray:
        return np.repeat(np.array(values, dtype), counts)

    canvases = batch.canvases
    return UnmaskInput(
        np.concatenate(ids), np.concatenate(positions), np.array(lens, np.int32),
        np.array([len(canvas.tokens) for canvas, _ in rows], np.int32), np.concatenate(slots), table, num_whole,
        np.concatenate(keys), np.concatenate(places), np.concatenate(blinds),
        each([c.params.cfg_scale for c in canvases], np.float32),
        each([c.params.temperature for c in canvases], np.float32), each([c.request.seed for c in canvases], np.int64),
        np.concatenate(offsets),
    )  # fmt: skip


def _slots(canvas: Canvas, block_size: int) -> np.ndarray:
    """Where the keys of all tokens of a request are in the cache."""
    inside = np.arange(len(canvas.tokens))
    return np.array(canvas.blocks, np.int64)[inside // block_size] * block_size + inside % block_size


def fill(batch: UnmaskBatch, output: UnmaskOutput) -> list[tuple[Request, list[int]]]:
    """Give each request what was computed for its masks. Returns (request, its block) of those with a finished one."""
    done, at = [], 0
    for canvas in batch.canvases:
        count = len(canvas.targets())
        part = slice(at, at + count)
        at += count
        if canvas.request.status is Status.FINISHED:
            continue
        if block := canvas.fill(output.token_ids[part], output.logprobs[part]):
            done.append((canvas.request, block))
    return done
