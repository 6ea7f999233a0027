"""Which requests run in the next step: prefill first, then decode; first come, first served.

Everything that runs arrived before everything that waits. When decoding runs out of blocks, the latest
arrival is preempted: it loses its blocks, keeps its generated tokens, and goes to the front of the queue;
its next prefill computes prompt and generated tokens again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from .blocks import BlockManager
from .request import Request, Status


class QueueFull(RuntimeError):
    """The waiting queue is at its bound; try again later."""


@dataclass(frozen=True)
class Batch:
    """One step's requests. Each computes its `num_new_tokens`; in a decode batch that is one."""

    requests: list[Request]
    decode: bool


class Scheduler:
    """Holds every unfinished request, in `waiting` or `running`, and its blocks."""

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, max_waiting: int
    ):
        self.blocks = blocks
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull, ValueError for one that can never run."""
        if len(self.waiting) >= self.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting already, no more than {self.max_waiting} may"
            )
        # The last generated token is never computed, and a resumed request prefills all the others at once.
        longest = len(request.prompt_token_ids) + request.max_tokens - 1
        room = min(self.blocks.num_usable * self.blocks.block_size, self.max_num_batched_tokens)
        if longest > room:
            raise ValueError(
                f"prompt and output of {longest + 1} tokens do not fit: there is room for {room + 1}"
            )
        self.waiting.append(request)

    def schedule(self) -> Batch | None:
        """The next step's batch, with blocks for it; None if there is nothing to run."""
        admitted = self._admit()
        if admitted:
            return Batch(admitted, decode=False)
        self._grow_running()
        return Batch(list(self.running), decode=True) if self.running else None

    def computed(self, batch: Batch) -> None:
        """After the step, before new tokens are appended: the batch's tokens are in the cache."""
        for request in batch.requests:
            request.num_computed_tokens = request.num_tokens

    def remove(self, requests: Iterable[Request]) -> None:
        """Take requests out, wherever they are, and free their blocks."""
        gone = {id(r) for r in requests}
        for request in [r for r in (*self.waiting, *self.running) if id(r) in gone]:
            self.blocks.free(request.block_table)
        self.waiting = deque(r for r in self.waiting if id(r) not in gone)
        self.running = [r for r in self.running if id(r) not in gone]

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        budget = self.max_num_batched_tokens
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            # Whatever runs may need a block at its next token: without this reserve a request would be
            # admitted only to be preempted a step later.
            reserve = len(self.running)
            need = self.blocks.missing(request.block_table, request.num_tokens)
            if request.num_new_tokens > budget or need + reserve > self.blocks.num_free:
                break
            self.waiting.popleft()
            self.blocks.grow(request.block_table, request.num_tokens)
            budget -= request.num_new_tokens
            request.status = Status.RUNNING
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _grow_running(self) -> None:
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if self.blocks.missing(request.block_table, request.num_tokens) <= self.blocks.num_free:
                self.blocks.grow(request.block_table, request.num_tokens)
                index += 1
            else:
                self._preempt(self.running.pop())

    def _preempt(self, request: Request) -> None:
        self.blocks.free(request.block_table)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.num_preemptions += 1
        self.waiting.appendleft(request)
