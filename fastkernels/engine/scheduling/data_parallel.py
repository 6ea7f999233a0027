"""Data-parallel ranks: each has a scheduler and a prefix cache, and all step together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from fastkernels.engine.options.speculation import DraftCounts
from fastkernels.engine.sampling.rows import TokenMasks
from fastkernels.engine.scheduling.engine_core import EngineCore, StepResult, masks_of
from fastkernels.engine.scheduling.payoff import Payoff
from fastkernels.engine.scheduling.request import Request
from fastkernels.engine.scheduling.scheduler import Batch, QueueFull, Scheduler
from fastkernels.engine.scheduling.step_input import make_step
from fastkernels.engine.steps.step import StepInput, StepOutput

WAITING = 4  # running sequences that count as much as a waiting one, as in vLLM


class Schedulers:
    """The schedulers of all ranks as one; max_waiting is of all together.

    A request goes to the rank with the fewest sequences, of which a waiting one counts WAITING times; of ranks with the
    same number to the first. All sequences of a request stay together, and share its prompt's blocks.
    """

    def __init__(self, ranks: Sequence[Scheduler], max_waiting: int):
        self.ranks, self.max_waiting = ranks, max_waiting
        self.speculation = ranks[0].speculation
        self._last = 0  # the rank of the last sequence

    def __len__(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def running(self) -> list[Request]:
        return [request for rank in self.ranks for request in rank.running]

    @property
    def num_waiting(self) -> int:
        return sum(rank.num_waiting for rank in self.ranks)

    @property
    def num_preemptions(self) -> int:
        return sum(rank.num_preemptions for rank in self.ranks)

    @property
    def prefix_queries(self) -> int:
        return sum(rank.prefix_queries for rank in self.ranks)

    @property
    def prefix_hits(self) -> int:
        return sum(rank.prefix_hits for rank in self.ranks)

    @property
    def draft_counts(self) -> DraftCounts:
        """Those of all ranks."""
        total = DraftCounts()
        for rank in self.ranks:
            total.merge(rank.draft_counts)
        return total

    @property
    def payoff(self) -> Payoff | None:
        """Whether drafts pay: one measurement and one average of all ranks, which wait for the slowest one."""
        return self.ranks[0].payoff

    @payoff.setter
    def payoff(self, payoff: Payoff | None) -> None:
        for rank in self.ranks:
            rank.payoff = payoff

    @property
    def cache_usage(self) -> float:
        """That of the rank with the fewest blocks left."""
        return max(rank.cache_usage for rank in self.ranks)

    @property
    def num_cache_tokens(self) -> int | None:
        """Tokens that the blocks of all ranks hold; None without blocks."""
        held = self.ranks[0].num_cache_tokens
        return None if held is None else held * len(self.ranks)

    def check_room(self, num: int = 1) -> None:
        """Raise QueueFull if `num` more requests may not wait."""
        if self.num_waiting + num > self.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting; the limit is {self.max_waiting}")

    def check_size(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ValueError for a request larger than the KV cache of a rank."""
        self.ranks[0].check_size(num_prompt_tokens, max_tokens)

    def add(self, request: Request) -> None:
        """Queue a sequence; those of a request one after the other. See Scheduler."""
        self.check_room()
        if request.index == 0:
            loads = [WAITING * rank.num_waiting + len(rank.running) for rank in self.ranks]
            self._last = loads.index(min(loads))
        request.rank = self._last
        self.ranks[request.rank].add(request)

    def remove(self, requests: Iterable[Request]) -> None:
        """Remove unfinished requests; see Scheduler."""
        for rank, found in groupby(sorted(requests, key=_rank), key=_rank):
            self.ranks[rank].remove(found)

    def remove_all(self) -> None:
        for rank in self.ranks:
            rank.remove_all()

    def reset_cache(self) -> None:
        for rank in self.ranks:
            rank.reset_cache()


def _rank(request: Request) -> int:
    return request.rank


class Round(Protocol):
    """A step in flight on all ranks; see executor.Round."""

    def sample(self, masks: Mapping[int, TokenMasks]) -> None: ...

    def results(self) -> Mapping[int, StepOutput]: ...


class Launcher(Protocol):
    """Runs the steps of all ranks: a DataParallelExecutor, or a stand-in in tests."""

    def launch_each(self, steps: Sequence[StepInput | None]) -> Round: ...

    def forget(self) -> None: ...


class DataParallelCore:
    """An EngineCore for each rank, in lockstep: a step runs on all of them, and its results are collected together.

    A rank without anything to run has a dummy step if the ranks share experts, see DataParallelExecutor.
    """

    def __init__(self, scheduler: Schedulers, executor: Launcher, depth: int = 1):
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self._cores = [EngineCore(rank, None, depth) for rank in scheduler.ranks]  # which collect only
        self._in_flight: deque[tuple[list[Batch | None], Round]] = deque()

    @property
    def busy(self) -> bool:
        return len(self.scheduler) > 0 or bool(self._in_flight)

    def results(self) -> list[StepResult]:
        """Launch the next batches and wait for the oldest ones; see EngineCore.step."""
        ranks = self.scheduler.ranks
        if self._in_flight and any(core.is_serial() for core in self._cores):
            return self._collect_oldest()
        for rank, core in enumerate(self._cores):
            core.take_proposed(any(batches[rank] is not None for batches, _ in self._in_flight))
        batches = [rank.schedule() for rank in ranks]
        launched = any(batch is not None for batch in batches)
        if launched:
            made = [
                None if batch is None else make_step(batch, rank.max_num_seqs + 1, rank.blocks.block_size)
                for rank, batch in zip(ranks, batches, strict=True)
            ]
            now = self.executor.launch_each(made)
            self._in_flight.append((batches, now))
            masked = [(rank, b) for rank, b in enumerate(batches) if b is not None and b.masked]
            if masked:
                before = self._collect_oldest() if len(self._in_flight) > 1 else None
                now.sample({rank: masks_of(batch, self.scheduler.speculation) for rank, batch in masked})
                if before is not None:
                    return before
        if not self._in_flight or (launched and len(self._in_flight) < self.depth):
            return []
        return self._collect_oldest()

    def end(self, requests: Iterable[Request]) -> None:
        """Remove unfinished requests. Results of steps in flight for them are dropped."""
        self.scheduler.remove(requests)

    def reset(self) -> None:
        """Remove all requests and forget the prefix caches, after a failed step."""
        self._in_flight.clear()
        for core in self._cores:
            core.forget_proposed()
        self.scheduler.remove_all()
        self.scheduler.reset_cache()
        self.executor.forget()  # otherwise the next rounds would get these results

    def _collect_oldest(self) -> list[StepResult]:
        batches, step = self._in_flight.popleft()
        found = step.results()
        return [
            self._cores[rank].collect(batch, found[rank])
            for rank, batch in enumerate(batches)
            if batch is not None
        ]
