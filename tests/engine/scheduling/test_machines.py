"""Random operations on the block manager, and on the scheduler with the simulated cache of cache_model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.cache_model import CacheModel, continuation

from fastkernels.engine.cache.blocks import BlockManager, OutOfBlocks, hash_block
from fastkernels.engine.cache.snapshots import Snapshots
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.scheduling.engine_core import EngineCore
from fastkernels.engine.scheduling.request import Request, Status
from fastkernels.engine.scheduling.scheduler import AGING, QueueFull, Scheduler

SIZE = 4


class BlockActions:
    """Operations on a block manager. Names come from few tokens, so that prefixes coincide."""

    def __init__(self, num_blocks: int):
        self.blocks = BlockManager(num_blocks, SIZE)
        self.tables: list[list[int]] = []
        self.names: list[list[bytes]] = []  # names of each table's first blocks

    def admit(self, kind: int, num_tokens: int) -> None:
        names: list[bytes] = []
        for i in range(num_tokens // SIZE):
            names.append(hash_block(names[-1] if names else b"", [kind, i]))
        found = self.blocks.find(names)
        self.blocks.hold(found)
        table = list(found)
        try:
            self.blocks.grow(table, num_tokens)
        except OutOfBlocks:
            assert table == found, "a failed grow changed the table"
            self.blocks.free(table)
            return
        for block, name in list(zip(table, names, strict=False))[len(found) :]:
            self.blocks.name(block, name)
        self.tables.append(table)
        self.names.append(names)

    def grow(self, index: int, more: int) -> None:
        table = self.tables[index % len(self.tables)]
        before = list(table)
        try:
            self.blocks.grow(table, len(table) * SIZE + more)
        except OutOfBlocks:
            assert table == before
        assert table[: len(before)] == before

    def free(self, index: int) -> None:
        index %= len(self.tables)
        self.names.pop(index)
        self.blocks.free(self.tables.pop(index))

    def check(self) -> None:
        blocks = self.blocks
        held: dict[int, int] = {}
        for table in self.tables:
            assert len(set(table)) == len(table), "a table has a block twice"
            for block in table:
                assert 0 < block < blocks.num_blocks
                held[block] = held.get(block, 0) + 1
        assert [held.get(b, 0) for b in range(blocks.num_blocks)] == blocks._refs
        assert blocks.num_free == blocks.num_usable - len(held)
        free = [*blocks._free, *blocks._evictable]
        assert len(set(free)) == len(free) and not set(free) & set(held)
        assert {n: b for b, n in enumerate(blocks._name) if n is not None} == blocks._block
        assert all(blocks._name[b] is not None for b in blocks._evictable)
        assert all(blocks._name[b] is None for b in blocks._free)
        shared = {b for b, n in held.items() if n > 1}
        assert all(blocks._name[b] is not None for b in shared) or not blocks._block, (
            "an unnamed block is shared"
        )


class BlockMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.actions = BlockActions(num_blocks)

    @rule(kind=st.integers(0, 2), num_tokens=st.integers(1, 40))
    def admit(self, kind: int, num_tokens: int) -> None:
        self.actions.admit(kind, num_tokens)

    @precondition(lambda self: self.actions.tables)
    @rule(index=st.integers(0, 50), more=st.integers(0, 9))
    def grow(self, index: int, more: int) -> None:
        self.actions.grow(index, more)

    @precondition(lambda self: self.actions.tables)
    @rule(index=st.integers(0, 50))
    def free(self, index: int) -> None:
        self.actions.free(index)

    @precondition(lambda self: not self.actions.tables)
    @rule()
    def reset(self) -> None:
        self.actions.blocks.reset_cache()
        assert self.actions.blocks.num_cached == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "actions"):
            self.actions.check()


def test_blocks_after_100_000_operations() -> None:
    rng, actions = random.Random(1), BlockActions(40)
    for number in range(100_000):
        if not actions.tables or rng.random() < 0.3:
            actions.admit(rng.randrange(5), rng.randint(1, 60))
        elif rng.random() < 0.5:
            actions.grow(rng.randrange(50), rng.randint(0, 9))
        else:
            actions.free(rng.randrange(50))
        if number % 500 == 0:
            actions.check()
    while actions.tables:
        actions.free(0)
    assert actions.blocks.num_free == actions.blocks.num_usable == 39


def test_double_free_is_an_error() -> None:
    blocks = BlockManager(4, SIZE)
    table: list[int] = []
    blocks.grow(table, 5)
    again = list(table)
    blocks.free(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        blocks.free(again)


class Traffic:
    """Requests that arrive, abort and finish in an engine core. Time advances by one per step."""

    def __init__(
        self,
        num_blocks: int,
        seqs: int,
        budget: int,
        depth: int,
        caching: bool,
        windows: tuple[int, ...] = (),
        snapshots: int | None = None,
        paged: bool = True,
    ):
        """snapshots: of layers that keep a state; None: there are none. paged: there are layers with a KV cache."""
        groups = [BlockManager(num_blocks, SIZE, caching, window) for window in (None, *windows) if paged]
        states = None if snapshots is None else Snapshots(snapshots, seqs + 1, SIZE, caching, interval=7)
        scheduler = Scheduler(groups, seqs, max(budget, seqs), max_waiting=12, states=states)
        slots = 0 if snapshots is None else seqs + 1 + snapshots
        self.model = CacheModel(num_blocks, SIZE, seqs, max(budget, seqs), windows, paged, slots)
        self.core = EngineCore(scheduler, self.model, depth)
        self.live: list[Request] = []
        self.time = self.number = 0

    def add(self, kind: int, length: int, max_tokens: int, stop: int, priority: int) -> None:
        self.number += 1
        prompt = [kind] * length
        request = Request(
            f"{self.number:06}", prompt, SamplingParams(max_tokens=max_tokens), max_tokens,
            frozenset([stop]), priority=priority, arrival=float(self.time),
        )  # fmt: skip
        waiting = self.core.scheduler.num_waiting
        try:
            self.core.scheduler.add(request)
        except (QueueFull, ValueError):
            assert self.core.scheduler.num_waiting == waiting
        else:
            self.live.append(request)

    def abort(self, index: int) -> None:
        request = self.live.pop(index % len(self.live))
        self.core.end([request])

    def change_weights(self) -> None:
        self.model.version += 1
        self.core.scheduler.reset_cache()

    def step(self) -> None:
        self.time += 1
        self.core.step()
        ended = [r for r in self.live if r.status is Status.FINISHED]
        self.live = [r for r in self.live if r.status is not Status.FINISHED]
        for request in ended:
            self._check_tokens(request)

    def _check_tokens(self, request: Request) -> None:
        expected = continuation(request.prompt_token_ids, request.max_tokens)
        ends = [i for i, t in enumerate(expected) if t in request.end_token_ids]
        assert request.output_token_ids == expected[: ends[0] + 1 if ends else None]

    def drain(self) -> None:
        """All requests finish within a number of steps bounded by the work."""
        work = sum(len(r.prompt_token_ids) + 2 * r.max_tokens for r in self.live)
        for _ in range(50 + 4 * work * (1 + len(self.live))):
            if not self.core.busy:
                break
            self.step()
        assert not self.core.busy and not self.live, "a request did not end"

    def check(self) -> None:
        scheduler = self.core.scheduler
        assert all(r.status is Status.RUNNING and r.slot >= 0 for r in scheduler.running)
        for group, blocks in enumerate(scheduler.groups):
            held: dict[int, int] = {}
            for request in scheduler.running:
                table = request.block_tables[group]
                assert table.blocks[: table.num_freed] == [0] * table.num_freed
                for block in table.blocks[table.num_freed :]:
                    held[block] = held.get(block, 0) + 1
            assert 0 not in held and blocks.num_free == blocks.num_usable - len(held)
            assert all(blocks._refs[b] == n for b, n in held.items())
            for block in blocks._block.values():
                oldest = self.model.oldest[group, block * SIZE : (block + 1) * SIZE]
                assert (oldest == self.model.version).all(), "a named block depends on older weights"
        if scheduler.states is not None:
            self._check_snapshots(scheduler, scheduler.states)
        slots = [r.slot for r in scheduler.running]
        assert sorted(slots + scheduler._slots) == list(range(scheduler.max_num_seqs))
        waiting = [r for r in self.live if r.status is Status.WAITING]
        assert len(waiting) == scheduler.num_waiting and not any(
            t.blocks for r in waiting for t in r.block_tables
        )

    def _check_snapshots(self, scheduler: Scheduler, states: Snapshots) -> None:
        """Every slot is free, named or taken by a running request; a named one has the tokens of its name."""
        taken = [slot for r in scheduler.running for _, slot in r.unnamed]
        every = [*states._free, *states._slot.values(), *taken]
        first = scheduler.max_num_seqs + 1
        assert sorted(every) == list(range(first, first + states.count))
        assert self.model.states is not None
        for name, slot in states._slot.items():
            tokens, oldest = self.model.states[slot]
            found = b""
            for i in range(0, len(tokens), SIZE):
                found = hash_block(found, tokens[i : i + SIZE])
            assert (found, oldest) == (name, self.model.version)
            assert not scheduler.groups or name in scheduler.groups[0]._block


class TrafficMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 14), seqs=st.integers(1, 5), budget=st.integers(1, 20), depth=st.integers(1, 2),
        caching=st.booleans(), windows=st.sampled_from([(), (1,), (5,), (13, 3)]),
        snapshots=st.sampled_from([None, 0, 1, 4]), paged=st.booleans(),
    )  # fmt: skip
    def start(self, **sizes: Any) -> None:
        self.traffic = Traffic(**{**sizes, "paged": sizes["paged"] or sizes["snapshots"] is None})

    @rule(
        kind=st.integers(0, 1), length=st.integers(1, 30), max_tokens=st.integers(1, 14), stop=st.integers(0, 60),
        priority=st.integers(-1, 1),
    )  # fmt: skip
    def add(self, **request: int) -> None:
        self.traffic.add(**request)

    @precondition(lambda self: self.traffic.live)
    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        self.traffic.abort(index)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.traffic.step()

    @rule()
    def change_weights(self) -> None:
        self.traffic.change_weights()

    @rule()
    def failed_step(self) -> None:
        self.traffic.core.reset()
        self.traffic.live.clear()
        scheduler = self.traffic.core.scheduler
        assert scheduler.blocks.num_cached == 0
        assert scheduler.states is None or scheduler.states.num_cached == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.check()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.drain()
            self.traffic.check()


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTraffic = TrafficMachine.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("depth", "windows", "more"),
    [
        pytest.param(1, (), {}, marks=pytest.mark.slow),
        (2, (), {}),
        (1, (6,), {}),
        pytest.param(2, (9, 2), {}, marks=pytest.mark.slow),
        (2, (), {"snapshots": 9}),
        (2, (), {"snapshots": 9, "paged": False}),
    ],
)
def test_traffic_of_many_operations(depth: int, windows: tuple[int, ...], more: dict[str, Any]) -> None:
    rng, traffic = random.Random(depth), Traffic(20, 6, 16, depth, True, windows, **more)
    for number in range(5_000 if windows or more else 20_000):
        kind = rng.random()
        if kind < 0.25:
            traffic.add(
                rng.randrange(3),
                rng.randint(1, 40),
                rng.randint(1, 20),
                rng.randrange(60),
                rng.randint(-1, 1),
            )
        elif kind < 0.3 and traffic.live:
            traffic.abort(rng.randrange(50))
        else:
            traffic.step()
        if number % 200 == 0:
            traffic.check()
        if number % 500 == 180:  # 20 operations before a check
            traffic.change_weights()
    traffic.drain()
    scheduler = traffic.core.scheduler
    assert all(b.num_free == b.num_usable for b in scheduler.groups) and len(scheduler._waiting) == 0
    assert scheduler.num_preemptions > (100 if scheduler.groups else -1) and scheduler.prefix_hits > 1000


def test_low_priority_request_gets_its_turn() -> None:
    """A low-priority request runs eventually while urgent ones arrive at every step."""
    traffic = Traffic(30, 1, 16, 1, caching=False)
    traffic.add(1, 4, 2, 60, priority=1)
    unimportant = traffic.live[0]
    for _ in range(int(AGING) * 20):
        if traffic.core.scheduler.num_waiting < 8:
            traffic.add(2, 4, 2, 60, priority=0)
        traffic.step()
    assert unimportant.status is Status.FINISHED
