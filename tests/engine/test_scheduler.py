"""Blocks and scheduler under any sequence of arrivals, steps and aborts: nothing leaks, order is kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastkernels.engine.blocks import BlockManager, OutOfBlocks
from fastkernels.engine.request import Request, Status
from fastkernels.engine.sampling_params import SamplingParams
from fastkernels.engine.scheduler import QueueFull, Scheduler

BLOCKS, SIZE, SEQS, BUDGET = 11, 4, 5, 40


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(BLOCKS, SIZE)
        self.scheduler = Scheduler(self.blocks, SEQS, BUDGET, max_waiting=12)
        self.arrived = 0
        self.expected = {}  # request: tokens generated so far

    @rule(prompt=st.integers(1, 30), out=st.integers(1, 20))
    def arrive(self, prompt, out):
        request = Request(f"{self.arrived:04}", list(range(prompt)), SamplingParams(), out)
        fits = prompt + out - 1 <= BUDGET
        full = len(self.scheduler.waiting) >= 12
        if full or not fits:
            with pytest.raises(QueueFull if full else ValueError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.expected[request] = []
        self.arrived += 1

    @rule()
    def step(self):
        batch = self.scheduler.schedule()
        assert (batch is None) == (not self.expected)
        if batch is None:
            return
        assert batch.requests and len(batch.requests) <= SEQS
        assert sum(r.num_new_tokens for r in batch.requests) <= BUDGET
        for r in batch.requests:
            assert r.status is Status.RUNNING
            assert len(r.block_table) * SIZE >= r.num_tokens
            if batch.decode:
                assert r.num_new_tokens == 1
            assert len(r.new_tokens()) == r.num_new_tokens
        self.scheduler.computed(batch)
        done = []
        for r in batch.requests:
            self.expected[r].append(len(r.output_token_ids))
            r.output_token_ids.append(len(r.output_token_ids))
            if len(r.output_token_ids) >= r.max_tokens:
                done.append(r)
        self.scheduler.remove(done)
        for r in done:
            assert r.output_token_ids == self.expected.pop(r)

    @rule(data=st.data())
    def abort(self, data):
        if self.expected:
            request = data.draw(st.sampled_from(list(self.expected)))
            self.scheduler.remove([request])
            del self.expected[request]
            assert request.block_table == []

    @invariant()
    def every_block_is_in_one_place(self):
        held = [b for r in (*self.scheduler.running, *self.scheduler.waiting) for b in r.block_table]
        free = list(self.blocks._free)
        assert sorted(held + free) == list(range(1, BLOCKS))

    @invariant()
    def first_come_first_served(self):
        running = [r.request_id for r in self.scheduler.running]
        waiting = [r.request_id for r in self.scheduler.waiting]
        assert running + waiting == sorted(running + waiting)
        assert len(running) + len(waiting) == len(self.expected)

    def teardown(self):
        for _ in range(2000):
            if not self.expected:
                break
            self.step()
        assert not self.expected, "requests never finish"
        assert self.blocks.num_free == BLOCKS - 1


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_refuse_double_free_and_overdraft():
    blocks = BlockManager(4, 2)
    table: list[int] = []
    blocks.grow(table, 5)
    assert len(table) == 3 and 0 not in table and blocks.usage == 1.0
    with pytest.raises(OutOfBlocks, match="0 of 3 free"):
        blocks.grow(table, 7)
    copy = list(table)
    blocks.free(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        blocks.free(copy)
