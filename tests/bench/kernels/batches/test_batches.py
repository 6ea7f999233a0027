"""Timed batches of a GPU: secret lengths that fit the captured graphs, and places of outputs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.batches.batches import GRAPH_CALLS, QUEUED, SINGLES, Batches
from fk_bench.kernels.judge.batches.lane import Lane, Timed, mapped
from fk_bench.kernels.judge.clock.call_times import Samples
from fk_bench.kernels.judge.correctness.checks import Checks, Wrong
from fk_bench.kernels.judge.memory import ipc, layout
from fk_bench.kernels.judge.memory.arena import Arena, memory_file
from fk_bench.kernels.judge.memory.gate import CallGate
from fk_bench.kernels.judge.memory.place import Place
from fk_bench.kernels.judge.memory.slots import Slots
from fk_bench.kernels.judge.processes.runner_process import RunnerError
from fk_bench.kernels.judge.rows.case import CaseRun, Plan
from fk_bench.kernels.judge.rows.verdict import Evidence, decide
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastkernels.core import registry

OP = "relu2"


@pytest.fixture
def fd() -> Iterator[int]:
    found = memory_file()
    yield found
    os.close(found)


class Side:
    """A side without a process."""

    trusted = False


def batches(fd: int, n: int, mode: str = "op", op: str = OP, singles: int = 0) -> Batches:
    """Batches of n calls over one arena in this process's memory."""
    spec = registry.get(op)
    case = next(c for c in spec.cases if "odd" in c.name)
    slots = Slots(spec, lambda g: spec.inputs(case, "cpu", g), "cpu", 2 * n + singles, mode, True)
    if mode == "module":
        slots.may_change = {0}  # as if the host's class wrote its result there
    slots.refresh()
    lane = Lane(Side(), Arena(slots, 0, fd))  # type: ignore[arg-type]
    return Batches(slots, n, lane, lane, Checks(spec, case, mode), 4)


@pytest.mark.parametrize("n", [2, 20, 60, 300])
def test_graphs_cover_all_slots_with_calls_alone(fd: int, n: int) -> None:
    made = batches(fd, n, singles=SINGLES)
    for _ in range(20):
        segments = made._segments()
        assert segments[0][0] == 0 and segments[-1][1] == made.slots.count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(segments))
        assert all(0 < e - s <= GRAPH_CALLS for s, e in segments)
        assert [[s, e] for s, e in segments if s >= 2 * n] == [
            [s, s + 1] for s in range(2 * n, 2 * n + SINGLES)
        ]
    if n > GRAPH_CALLS // 2:
        assert len({str(made._segments()) for _ in range(8)}) > 1  # secret


@pytest.mark.parametrize("n", [2, 20, 300])
def test_batches_have_secret_lengths(fd: int, n: int) -> None:
    made = batches(fd, n, singles=SINGLES)
    lengths = set()
    for _ in range(50):
        made.segments = made._segments()
        start, calls = made._span(False)
        lengths.add(calls)
        assert start >= 0 and 0.7 * n <= calls <= n and start + calls <= 2 * n
        edges = {x for segment in made.segments for x in segment}
        assert {start, start + calls} <= edges  # only whole graphs can be replayed
    assert made._span(True) == (0, 2 * n)
    assert n < 300 or len(lengths) > 2


def test_calls_of_long_batch_only_are_compared(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls behind 2n have made their outputs from earlier inputs."""
    made = batches(fd, 4, singles=SINGLES)
    made.candidate.outputs = [[torch.zeros(1)] for _ in range(made.slots.count)]
    compared, ran, gated = [], [], []
    monkeypatch.setattr(made, "_check", lambda *args: None)
    monkeypatch.setattr(
        made, "_batch", lambda lane, start, count, *rest: (ran.append((start, count)), ([], []))[1]
    )
    monkeypatch.setattr(made.checks, "same", lambda *args: compared.append([len(o) for o in args[2:]]))
    monkeypatch.setattr(made, "_gated", lambda lane, picked, timed: gated.append(lane) or [])
    made._round(0, Timed(Samples(4), Samples(4), Samples(4)), True)
    assert compared == [[8, 8]] and (0, 8) in ran and gated


@pytest.mark.parametrize(
    ("device", "memory", "n"),
    [
        ("cpu", 1 << 40, 20),
        ("cpu", 100 << 20, 16),
        ("cpu", 0, 4),
        ("cuda", 1 << 40, 20),
        ("cuda", 700 << 20, 28),
    ],
)
def test_batches_shrink_to_the_memory(device: str, memory: int, n: int) -> None:
    """Both sides' arenas, their outputs and the judge's own slots must fit."""
    run = CaseRun.__new__(CaseRun)
    run.plan = Plan(
        device,
        4,
        4,
        1.0,
        5e-2 if device == "cpu" else 2e-3,
        20 if memory > 1 << 30 or device == "cpu" else 768,
        memory,
    )
    described = layout.Layout([], [], stride=1 << 20)
    run._slots = cast(Any, SimpleNamespace(layout=described, out_bytes=1 << 20))
    assert run._calls(1e-5, 1e-5, 1) == n


def test_calls_alone_are_queued_together(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU: one request queues calls of different slots, each with its own ticket, and each is passed once."""
    made = batches(fd, 4, singles=SINGLES)
    asked, opened = [], []

    class Queue:
        gate = CallGate(fd)

        def ask(self, do: str, slots: list[int], tickets: list[int]) -> None:
            asked.append((do, slots, tickets))

        def stop(self) -> None:
            asked.append("stop")

        def check_stopped(self) -> None:
            asked.append("checked")

    monkeypatch.setattr(made, "_open", lambda lane, slot, ticket, timed: opened.append((slot, ticket)) or [])
    made._gated(Lane(Queue(), made.candidate.arena), [9, 20, 11], None)  # type: ignore[arg-type]
    (do, slots, tickets), *later = asked
    assert do == "queue" and later == ["stop", "checked"] and opened == list(zip(slots, tickets, strict=True))
    assert slots == [9, 20, 11] and sorted(set(tickets)) == tickets

    def wrong(*args: object) -> None:
        raise Wrong("the first call")

    monkeypatch.setattr(made, "_open", wrong)
    with pytest.raises(Wrong):
        made._gated(Lane(Queue(), made.candidate.arena), [9], None)  # type: ignore[arg-type]
    assert Queue.gate._words[0] == asked[-2][2][-1]  # what still waits must not block the next command


@pytest.mark.parametrize("shared", [0, 64])
def test_calls_alone_are_checked_after_both_sides(
    fd: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check slows the next call; where slots share memory, the other side's call would overwrite its inputs."""
    made = batches(fd, 4, singles=SINGLES)
    made.baseline = Lane(made.baseline.side, made.baseline.arena)
    made._queued, made.slots.layout.shared = 1 if shared else QUEUED, shared
    for _ in range(20):
        order: list[Any] = []

        def gated(lane: Lane, picked: list[int], timed: None, order: list[Any] = order) -> list[int]:
            order.append(("candidate" if lane is made.candidate else "baseline", picked))
            return picked[:2]

        monkeypatch.setattr(made, "_gated", gated)
        monkeypatch.setattr(made, "_check", lambda *args, order=order: order.append(args))
        made._both_alone(None)
        ran = dict(entry for entry in order if isinstance(entry[0], str))
        (check,) = (entry for entry in order if not isinstance(entry[0], str))
        assert check == (ran["candidate"][:2], ran["candidate"])
        slots = ran["candidate"] + ran["baseline"]
        assert len(set(slots)) == 2 * made._queued and min(slots) >= 8
        assert order.index(check) == (order.index(("candidate", ran["candidate"])) + 1 if shared else 2)


def places(made: Batches, position: int = 0) -> list[list[Place]]:
    """An output of each slot in the memory of its argument."""
    arena, found = made.candidate.arena, []
    for slot in range(made.slots.count):
        t = layout.tensors(arena.args_of(slot)[position])[0]
        at = t.data_ptr() - arena.bytes.data_ptr()
        found.append([Place(nbytes=t.nbytes, stride=list(t.stride()), arena=at)])
    return found


def mapped_of(made: Batches, lane: Lane, at: list[list[Place]]) -> list[list[torch.Tensor]]:
    return mapped(lane.arena, at, ipc.Mapping(), lane is made.candidate, lane.side.trusted)


def test_outputs_in_written_arguments_are_mapped(fd: int) -> None:
    made = batches(fd, 2, "module")
    views = mapped_of(made, made.candidate, places(made))
    for slot, (view,) in enumerate(views):
        assert torch.equal(view, made.candidate.arena.args_of(slot)[0])


def test_outputs_in_other_arguments_are_wrong(fd: int) -> None:
    made = batches(fd, 2, "op")
    with pytest.raises(Wrong, match="an argument that the op does not write"):
        mapped_of(made, made.candidate, places(made))
    made.candidate.side.trusted = True  # some kernels of production write their result over an input
    assert len(mapped_of(made, made.candidate, places(made))) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p[:-1], "other calls"),
        (lambda p: [*p[:-1], []], "other calls"),
        (lambda p: [p[0], p[0], *p[2:]], "does not write"),  # of another slot
        (lambda p: [[Place(nbytes=64, stride=[])], *p[1:]], "strides"),
        (lambda p: [[p[0][0].model_copy(update={"nbytes": 4})], *p[1:]], "4 bytes"),
        (lambda p: [[p[0][0].model_copy(update={"stride": [1 << 30, 1]})], *p[1:]], "strides"),
        (lambda p: [[p[0][0].model_copy(update={"arena": 1 << 39})], *p[1:]], "does not write"),
        (lambda p: [[p[0][0].model_copy(update={"arena": None})], *p[1:]], "names no memory"),
    ],
)
def test_impossible_places_are_wrong(fd: int, change, said: str) -> None:
    made = batches(fd, 2, "module")
    with pytest.raises(Wrong, match=said):
        mapped_of(made, made.candidate, change(places(made)))


@pytest.mark.parametrize(("at", "more"), [(1, 0), (0, 1)])
def test_output_at_odd_address_is_wrong(fd: int, at: int, more: int) -> None:
    made = batches(fd, 1, "module", "silu_and_mul")
    (out,), good = made.slots.outs, places(made)  # the output is half as large as the argument
    place = Place(nbytes=out.bytes + more, stride=[out.shape[-1], 1], arena=(good[0][0].arena or 0) + at)
    with pytest.raises(Wrong, match="an address that no"):
        mapped_of(made, made.candidate, [[place], good[1]])


def test_impossible_place_of_the_baseline_is_its_failure(fd: int) -> None:
    made = batches(fd, 2, "op")
    made.candidate = Lane(made.baseline.side, made.baseline.arena)
    with pytest.raises(RunnerError, match="an argument that the op does not write") as caught:
        mapped_of(made, made.baseline, places(made))
    verdict = decide(Evidence(failure=caught.value))
    assert (verdict.status, verdict.reason[:13]) == (Status.FAILED, "the baseline:")


numbers = st.one_of(st.integers(0, 40), st.integers(0, 1 << 40))


@pytest.fixture
def made(fd: int) -> Batches:
    return batches(fd, 1, "module")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.data())
def test_any_place_is_mapped_inside_its_argument_or_wrong(made: Batches, data: st.DataObject) -> None:
    arena, good = made.candidate.arena, places(made)
    place = good[0][0]
    changes = {
        "nbytes": st.one_of(st.just(place.nbytes), numbers),
        "stride": st.one_of(st.just(place.stride), st.lists(numbers, max_size=3)),
        "arena": st.one_of(st.integers(-8, 8).map(lambda d: max((place.arena or 0) + d, 0)), numbers),
    }
    changed = Place.model_validate({k: data.draw(v, label=k) for k, v in changes.items()})
    try:
        ((view,), _) = mapped_of(made, made.candidate, [[changed], good[1]])
    except Wrong:
        return
    x = layout.tensors(arena.args_of(0)[0])[0]
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) * view.element_size()
    assert x.data_ptr() <= view.data_ptr()
    assert view.data_ptr() + last + view.element_size() <= x.data_ptr() + x.nbytes
