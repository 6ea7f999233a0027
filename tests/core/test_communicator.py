"""Groups of real processes: shared memory, ranks that make other calls, come late or die, and what is freed."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks

from fastkernels.core import parallel
from fastkernels.core.communicator import CollectiveError, Meeting
from fastkernels.overrides.collective.measure import choose


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


@dataclasses.dataclass
class Handle:
    """The result of PyTorch's rendezvous, for a buffer that no other rank can reach."""

    buffer: torch.Tensor

    def get_buffer(self, rank: int, *_: Any) -> torch.Tensor:
        return self.buffer


def _symmetric(rank: int, failing: str) -> Any:
    """Connect as ranks on GPUs do, with rank 1 failing at a step of PyTorch's."""
    import torch.distributed._symmetric_memory as symm_mem

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if rank == 1 and failing == "empty":
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return torch.empty(size, dtype=dtype)

    def rendezvous(buffer: torch.Tensor, group: str) -> Handle:
        assert failing != "empty", "a rank waits for one that has no memory"
        if rank == 1 and failing == "rendezvous":
            raise RuntimeError("no peer access")
        return Handle(buffer)

    def tensor(data: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return made(data, dtype=dtype)

    made, zeros = torch.tensor, torch.zeros
    comm = parallel.communicator()
    comm.device = torch.device("cuda")
    if failing == "late":
        comm.timeout = 1.0
    if rank == 1 and failing == "late":
        time.sleep(2.5)
    if rank == 1 and failing == "dead":
        os._exit(9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symm_mem, "empty", empty)
        patch.setattr(symm_mem, "rendezvous", rendezvous)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch, "zeros", lambda *size, device, **more: zeros(*size, **more))
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        try:
            said = comm.connect()
        except CollectiveError as error:
            return f"{error} [{error.rank}, {error.fatal}]"
        return said, choose(comm) if said else "ours", comm.symmetric is not None


@pytest.mark.parametrize(
    ("failing", "why"), [("empty", "CUDA out of memory"), ("rendezvous", "no peer access")]
)
def test_symmetric_memory_is_for_all_ranks_or_none(failing: str, why: str) -> None:
    for said, chosen, connected in ranks.run(2, _symmetric, failing):
        assert said == f"no symmetric memory: rank 1: {why}" and chosen == -1 and not connected


def test_symmetric_memory_is_set_up_in_all_ranks() -> None:
    assert ranks.run(2, _symmetric, "") == [(None, "ours", True)] * 2


def _slow_look(rank: int, failing: str) -> Any:
    """Rank 0 looks whether rank 1 is alive when that has come to the step and ended."""
    comm = parallel.communicator()
    if rank == 0:
        alive = comm.meeting.alive

        def later(other: int) -> bool:
            time.sleep(1.5)
            return alive(other)

        comm.meeting.alive = later
    else:
        time.sleep(0.5)
    return comm._told("a step", "")


def test_rank_that_comes_and_ends_between_looks_is_not_missed() -> None:
    assert ranks.run(2, _slow_look, "") == [["", ""]] * 2


def _ended(rank: int) -> int | None:
    """The rank that rank 2 finds dead: rank 1 is killed, rank 0 left the group with an error and ended."""
    meeting = parallel.communicator().meeting
    assert meeting is not None
    if rank == 0:
        meeting.fail("rank 1 is gone", 1)
    if rank < 2:
        os._exit(9)
    until = time.monotonic() + 10
    while (meeting.alive(0) or meeting.alive(1)) and time.monotonic() < until:
        time.sleep(0.01)
    return meeting.dead()


def test_killed_rank_is_named_before_one_that_ended_after_it() -> None:
    assert ranks.run(3, _ended) == [None, None, 1]


def test_rank_without_symmetric_memory_in_time_is_named() -> None:
    first, second = ranks.run(2, _symmetric, "late")
    assert "allocation of symmetric memory: rank 1 has not come in 1 s [1, True]" in first
    assert "rank 0 has left the group at this step [0, True]" in second


def test_rank_that_dies_before_symmetric_memory_is_named() -> None:
    first, nothing = ranks.run(2, _symmetric, "dead")
    assert nothing is None and "the process of rank 1 has ended [1, True]" in first


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
