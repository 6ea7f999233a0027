"""The gate of queued GPU work: the words that the judge and a side share."""

from __future__ import annotations

import os

import pytest
import torch
from fk_bench.kernels.judge.memory.arena import memory_file
from fk_bench.kernels.judge.memory.gate import Gate


def test_words_are_shared_and_tickets_grow() -> None:
    fd = memory_file()
    judge, side = Gate(fd), Gate(fd)
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
    following = Gate(fd)  # of the next process
    following.reset()
    assert side._words[0] < following.ticket() and not following.passed(second + 1, 0.001)
    os.close(fd)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_queued_work_waits_until_the_gate_opens() -> None:
    fd = memory_file()
    judge, side = Gate(fd), Gate(fd)
    x, stream = torch.zeros(4, device="cuda"), torch.cuda.Stream()
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
