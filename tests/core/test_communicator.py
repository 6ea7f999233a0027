"""Groups of real processes: shared memory, ranks that make other calls, come late or die, and what is freed."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks

from fastkernels.core import parallel
from fastkernels.core.communicator import CollectiveError, Meeting


def failure(call: Any) -> str:
    try:
        call()
    except CollectiveError as error:
        return f"{error} [{error.rank}, {error.fatal}]"
    return ""


def _different_calls(rank: int) -> list[str]:
    comm = parallel.communicator()
    said = [
        failure(lambda: comm.exchange("all_reduce", torch.zeros(3 + rank))),
        failure(
            lambda: comm.exchange("all_reduce", torch.zeros(3, dtype=[torch.float32, torch.int64][rank]))
        ),
        failure(lambda: comm.exchange(["all_reduce", "all_gather"][rank], torch.zeros(3))),
    ]
    parts = comm.exchange("all_reduce", torch.full((2,), float(rank)))  # the group is still of use
    assert [t.tolist() for t in parts] == [[0.0, 0.0], [1.0, 1.0]]
    return said


def test_different_calls_fail_in_all_ranks() -> None:
    mine, theirs = ranks.run(2, _different_calls)
    assert mine == theirs
    assert "rank 0: all_reduce(float32 [3]); rank 1: all_reduce(float32 [4])" in mine[0]
    assert "rank 1: all_reduce(int64 [3])" in mine[1] and "rank 1: all_gather(float32 [3])" in mine[2]


def _dead(rank: int, op: str) -> Any:
    x = torch.ones(4)
    reduce = {"shared": parallel.all_reduce, "gloo": _gloo}[op]
    reduce(x)
    if rank == 1:
        os._exit(9)
    begin = time.perf_counter()
    first = failure(lambda: reduce(x))
    return first, failure(lambda: reduce(x)), time.perf_counter() - begin


def _gloo(x: torch.Tensor) -> None:
    comm = parallel.communicator()
    with comm.naming("all_reduce"):
        dist.all_reduce(x)


@pytest.mark.parametrize("op", ["shared", "gloo"])
def test_dead_rank_is_named_at_once(op: str) -> None:
    (first, again, seconds), nothing = ranks.run(2, _dead, op)
    assert nothing is None and seconds < 5
    assert "the process of rank 1 has ended" in first and "[1, True]" in first
    assert op == "gloo" or "closed since an earlier call failed" in again


def _late(rank: int) -> Any:
    if rank == 2:
        time.sleep(2.0)
    return failure(lambda: parallel.all_reduce(torch.ones(4)))


def test_late_rank_is_named_and_told() -> None:
    first, second, late = ranks.run(3, _late, late_s=0.7)
    named = [said for said in (first, second) if "rank 2 has not made this call in 0.7 s" in said]
    assert named and all("rank 2" in said or "has left the group" in said for said in (first, second))
    assert "has left the group in this call" in late, late


def _freed(rank: int) -> list[Any]:
    first = parallel.communicator()
    memory = first.meeting
    assert memory is not None
    parallel.bind_process_group()  # again: a new one, and the old one is closed
    second = parallel.communicator()
    dist.barrier()
    closed = failure(lambda: memory.arrive("all_reduce()"))
    parallel.reset()
    del first
    return [second is not memory, closed, parallel.communicator().size, sorted(parallel._communicators)]


def test_group_is_freed_when_it_is_left() -> None:
    for new, closed, size, known in ranks.run(2, _freed):
        assert new and "it was closed in this rank" in closed and size == 1 and known == []


def test_unknown_group_is_an_error_that_lists_all() -> None:
    with pytest.raises(ValueError, match="there is no group 'ep' of ranks, only tp: call"):
        parallel.communicator("ep")
    joined = parallel.join("ep", 0, 1)
    assert parallel.communicator("ep") is joined
    with pytest.raises(ValueError, match="rank 1 is not in a group of size 1"):
        parallel.join("ep", 1, 1)


def test_meeting_refuses_more_ranks_than_it_has_lines_for() -> None:
    fd = os.memfd_create("meeting")
    with pytest.raises(ValueError, match="65 ranks"):
        Meeting(fd, 0, 65, 1 << 20, 1.0)
    os.close(fd)
