"""The gate of queued GPU work: the words that the judge and a side share."""

from __future__ import annotations

import os

import pytest
import torch
from fk_bench.kernels.judge.memory import layout, producer
from fk_bench.kernels.judge.memory.arena import memory_file
from fk_bench.kernels.judge.memory.gate import CallGate


def test_words_are_shared_and_tickets_grow() -> None:
    fd = memory_file()
    judge, side = CallGate(fd), CallGate(fd)
    first, second = judge.ticket(), judge.ticket()
    assert first < second and side._words[0] == 0
    judge.open(first)
    assert side._words[0] == first < second  # what waits for a ticket that is not above it goes on
    assert not judge.passed(first, 0.001)
    side._words[1] = first
    assert judge.passed(first, 0.001)
    assert not judge.passed(second, 0.001)  # an earlier report does not count
    judge.open(second)
    side._words[1] = second
    assert side._words[0] == second and judge.passed(second, 0.001)
    judge.turn(True)
    assert side._words[2] == 1
    following = CallGate(fd)  # of the next process
    following.reset()
    assert side._words[2] == 0
    assert side._words[0] < following.ticket() and not following.passed(second + 1, 0.001)
    os.close(fd)


@pytest.mark.gpu
def test_queued_work_waits_until_the_gate_opens() -> None:
    fd = memory_file()
    judge, side = CallGate(fd), CallGate(fd)
    x, stream = (
        torch.zeros(4, device="cuda").add_(0),
        torch.cuda.Stream(),
    )  # add_ is loaded before the stream waits
    torch.cuda.synchronize()
    ticket = judge.ticket()
    with torch.cuda.stream(stream):
        side.wait(stream.cuda_stream, ticket)
        x.add_(1)
        side.report(stream.cuda_stream, ticket)
    assert not judge.passed(ticket, 0.05)
    judge.open(ticket)
    assert judge.passed(ticket, 5.0) and x.sum().item() == 4
    os.close(fd)


def test_produced_values_are_floats_of_one_slot() -> None:
    ids, table, x = torch.zeros(3, dtype=torch.int64), torch.zeros(4096), torch.zeros(2000)
    args: list[object] = [ids, None, table, x.view(2, 1000).t(), x]
    plan = layout.describe(args, share_from=16000).to_json()
    found = producer.region(plan, args)
    assert found is not None and found.data_ptr() == x.data_ptr() and len(found) == producer.MOST
    assert producer.region(layout.describe(args[:4], share_from=16000).to_json(), args[:4]) is None


@pytest.mark.gpu
def test_producer_restores_what_the_judge_has_turned() -> None:
    fd = memory_file()
    gate, x = CallGate(fd), torch.randn(1500, device="cuda")
    before = x.clone()
    launch = producer.launcher(x[: producer.MOST], gate.turned)
    for turned in (True, False):
        gate.turn(turned)
        x[: producer.MOST] *= -1 if turned else 1
        launch()
        torch.cuda.synchronize()
        assert torch.equal(x, before)
    os.close(fd)
