"""The step loop: schedule, launch, collect. It handles token ids, not text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from fastkernels.engine.options.draft_tree import DraftTree
from fastkernels.engine.options.speculation import MOST_DRAFTS, Speculation
from fastkernels.engine.sampling.rows import TokenMasks
from fastkernels.engine.scheduling.constraints import advance
from fastkernels.engine.scheduling.outputs import append_token, end_early
from fastkernels.engine.scheduling.request import Request, Status
from fastkernels.engine.scheduling.scheduler import Batch, Scheduler
from fastkernels.engine.scheduling.step_input import make_step
from fastkernels.engine.steps.step import Launcher, Pending, StepOutput, TokenLogprobs


@dataclass(frozen=True)
class StepResult:
    """A finished step. `news`: (row, request) of the requests with a new token. The others of the batch computed a part
    of their prompt, or ended before the step did.

    counts  {row: number of its new tokens} of rows with drafts. Rows count the step's sampled tokens
    """

    batch: Batch
    output: StepOutput
    news: list[tuple[int, Request]]
    counts: dict[int, int] = field(default_factory=dict)


class EngineCore:
    """Runs steps. depth: the number of steps in flight. executor: None if steps are only collected here.

    With depth 2, a step is scheduled while the previous one runs and its tokens are unknown. A request that these
    tokens end computes one token too many, which is dropped.

    Drafts that stay on the device do not keep a step from being scheduled early: see NextDrafts.unsure. While a request
    with a constraint runs, steps with drafts run one after the other, since its masks follow from its drafts.

    A step with constrained rows (Batch.masked) is launched like any other, but samples only once the tokens of the
    step before it are known and the masks that follow from them are filled. Its model runs meanwhile.
    """

    def __init__(self, scheduler: Scheduler, executor: Launcher | None, depth: int = 1):
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self._in_flight: deque[tuple[Batch, Pending]] = deque()
        self._proposing: tuple[Batch, Callable[[], np.ndarray]] | None = None  # a step with a draft model

    @property
    def busy(self) -> bool:
        return len(self.scheduler) > 0 or bool(self._in_flight)

    def step(self) -> StepResult | None:
        """Launch the next batch and wait for the oldest one. None if no step has to be waited for."""
        if self._in_flight and self.is_serial():
            return self._collect_oldest()
        self.take_proposed(bool(self._in_flight))
        batch = self.scheduler.schedule()
        if batch is not None:
            assert self.executor is not None
            rows, block_size = self.scheduler.max_num_seqs + 1, self.scheduler.blocks.block_size
            pending = self.executor.launch(make_step(batch, rows, block_size))
            self._in_flight.append((batch, pending))
            if batch.masked:
                before = self._collect_oldest() if len(self._in_flight) > 1 else None
                pending.sample(masks_of(batch, self.scheduler.speculation))
                if before is not None:
                    return before
        if not self._in_flight or (batch is not None and len(self._in_flight) < self.depth):
            return None
        return self._collect_oldest()

    def results(self) -> list[StepResult]:
        """The same as a list, which DataParallelCore makes of several ranks."""
        done = self.step()
        return [] if done is None else [done]

    def end(self, requests: Iterable[Request]) -> None:
        """Remove unfinished requests. Results of steps in flight for them are dropped."""
        self.scheduler.remove(requests)

    def reset(self) -> None:
        """Remove all requests and forget the prefix cache, after a failed step."""
        self._in_flight.clear()
        self.forget_proposed()
        self.scheduler.remove_all()
        self.scheduler.reset_cache()

    def is_serial(self) -> bool:
        """Whether the next step needs the drafts of the one in flight on the host."""
        if self.scheduler.speculation is None:
            return False
        return any(request.constraint is not None for request in self.scheduler.running)

    def _collect_oldest(self) -> StepResult:
        batch, pending = self._in_flight.popleft()
        return self.collect(batch, pending.result())

    def forget_proposed(self) -> None:
        """Drop the drafts of the last step."""
        self._proposing = None

    def take_proposed(self, more: bool) -> None:
        """Give the requests of the last step the drafts that a model has made meanwhile.

        more: a step after that one makes others
        """
        if self._proposing is None:
            return
        (batch, wait), self._proposing = self._proposing, None
        if more:
            return
        for request, offset, drafts in zip(batch.requests, batch.offsets, wait().tolist(), strict=True):
            if offset >= 0 and request.status is Status.RUNNING:
                request.proposed = drafts

    def collect(self, batch: Batch, output: StepOutput) -> StepResult:
        """Give the tokens of a step to its requests, and remove those that end."""
        if output.next_drafts is not None:
            self._proposing = batch, output.next_drafts
        if batch.drafts:
            return self._collect_drafts(batch, output)
        news, ended, constrained = [], [], []
        tokens = output.token_ids.tolist()
        for row, request in enumerate(batch.requests):
            if batch.offsets[row] >= 0 and request.status is not Status.FINISHED:
                request.num_inflight -= 1
                append_token(request, tokens[row])
                news.append((row, request))
                if request.finish_reason is not None:
                    ended.append(request)
                elif request.constraint is not None:
                    constrained.append(request)
        for request, reason in advance(constrained):
            end_early(request, reason)
            ended.append(request)
        if ended:
            self.scheduler.remove(ended)
        return StepResult(batch, output, news)

    def _collect_drafts(self, batch: Batch, output: StepOutput) -> StepResult:
        """The same for a step with drafts: tokens up to the first that differs from the draft in its place."""
        settings = self.scheduler.speculation
        if output.input_ids is not None:
            batch.drafts = _read_drafts(batch, output.input_ids)
        all_drafts = batch.drafts
        if settings is not None and settings.tree is not None:
            all_drafts, output = _along_paths(settings.tree, batch, output)
        news, ended, counts, first = [], [], dict[int, int](), 0
        tokens = output.token_ids.tolist()
        for row, request in enumerate(batch.requests):
            drafts, at = all_drafts[row], first
            first += len(drafts) + 1
            if batch.offsets[row] < 0 or request.status is Status.FINISHED:
                continue
            request.num_inflight -= 1 + len(batch.drafts[row])
            request.num_unsure -= len(batch.drafts[row])
            sampled, expected = tokens[at:first], drafts
            if batch.forced:
                expected = drafts[: batch.forced[row]]
                sampled = [*expected, sampled[len(expected)]]
            count = 0
            for token, draft in zip(sampled, [*expected, None], strict=True):
                append_token(request, token)
                count += 1
                if request.finish_reason is None and request.constraint is not None:
                    for _, reason in advance([request]):
                        end_early(request, reason)
                if request.finish_reason is not None or token != draft:
                    break
            if batch.drafts[row]:
                # Also the stop token itself, and what the model agrees with behind it.
                same = [token == draft for token, draft in zip(sampled, [*expected, None], strict=True)]
                self.scheduler.accept(request, len(batch.drafts[row]), count - 1, same.index(False))
            news.append((at, request))
            counts[at] = count
            if request.finish_reason is not None:
                ended.append(request)
        if ended:
            self.scheduler.remove(ended)
        return StepResult(batch, output, news, counts)


def _read_drafts(batch: Batch, input_ids: np.ndarray) -> list[list[int]]:
    """The drafts of each row, from the tokens of the step."""
    ids, ends = input_ids.tolist(), np.cumsum(batch.counts).tolist()
    return [ids[end - len(drafts) : end] for end, drafts in zip(ends, batch.drafts, strict=True)]


def _along_paths(tree: DraftTree, batch: Batch, output: StepOutput) -> tuple[list[list[int]], StepOutput]:
    """The accepted drafts of each row's tree, and the output with the tokens before and behind these only."""
    drafts, rows, first = list[list[int]](), list[int](), 0
    for row, proposed in enumerate(batch.drafts):
        sampled = output.token_ids[first : first + len(proposed) + 1].tolist()
        path = tree.accepted(proposed, sampled, batch.forced[row] if batch.forced else None)
        drafts.append([proposed[node - 1] for node in path])
        rows += [first, *(first + node for node in path)]
        first += len(proposed) + 1
    logprobs = output.logprobs
    if logprobs is not None:
        logprobs = TokenLogprobs(logprobs.token_ids[rows], logprobs.logprobs[rows], logprobs.ranks[rows])
    return drafts, replace(output, token_ids=output.token_ids[rows], logprobs=logprobs)


_CHAIN = [[node + 1] for node in range(MOST_DRAFTS + 1)]


def masks_of(batch: Batch, speculation: Speculation | None) -> TokenMasks:
    """The masks of the batch's constrained rows. A sequence that has ended since it was scheduled needs none.

    Rows count the sampled tokens: those behind drafts follow that of their request.
    """
    rows, words, place = list[int](), list[np.ndarray](), -1
    for row, request in enumerate(batch.requests):
        drafts = batch.drafts[row] if batch.drafts else []
        place += 1 + (len(batch.drafts[row - 1]) if row and batch.drafts else 0)
        if (
            batch.offsets[row] >= 0
            and request.constraint is not None
            and request.status is not Status.FINISHED
        ):
            children = (
                _CHAIN if speculation is None or speculation.tree is None else speculation.tree.children
            )
            behind = request.constraint.words_behind(request.output_token_ids, drafts, children)
            rows += [place + node for node in behind]
            words += behind.values()
    return TokenMasks(np.array(rows, np.int64), np.stack(words) if words else np.empty((0, 0), np.int32))
