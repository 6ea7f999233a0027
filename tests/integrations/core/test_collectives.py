"""Our all-reduce in a host's group: all ranks change or none does, and larger messages stay the host's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fk_integrations.core import collectives
from fk_integrations.core.collectives import _Found, agreed
from support import ranks

from fastkernels.core.communicator import CollectiveError
from fastkernels.overrides.collective.in_hosts import Ours, summed
from fastkernels.overrides.collective.measure import SIZES, limit


class Host:
    """The attributes of a host's communicator that our seam needs. Its sums are in place, and counted."""

    def __init__(self, rank: int, size: int):
        self.cpu_group = self.device_group = dist.group.WORLD
        self.device, self.world_size, self.rank_in_group, self.calls = torch.device("cpu"), size, rank, 0

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        dist.all_reduce(input_)
        return input_


class Live(Host):
    fastkernels_collective: Ours

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return summed(self, input_)


def sums(rank: int) -> tuple[list[bool], int, int]:
    host = Live(rank, 2)
    made, ours = collectives.join(host, Host, "all_reduce")  # type: ignore[misc]
    host.fastkernels_collective = Ours(ours.group, 400)
    right = []
    for n in (1, 63, 100, 101, 1128):  # of float32; 101 and more are the host's
        x = torch.arange(n) + 1.0 + rank
        right.append(torch.equal(host.all_reduce(x.clone()), 2 * torch.arange(n) + 3.0))
    calls = host.calls
    made.close()
    _, again = collectives.join(host, Host, "all_reduce")  # type: ignore[misc]
    return right, calls, again.most


def test_small_messages_are_ours_and_larger_ones_the_hosts() -> None:
    assert ranks.run(2, sums) == [([True] * 5, 2, 1 << 62)] * 2


def refused(rank: int) -> list[str]:
    collectives._unsupported = lambda made, op: "no peer access" if rank == 1 else ""  # type: ignore[assignment]
    return [collectives.join(Host(rank, 3), Host, "all_reduce") for _ in range(2)]  # type: ignore[misc]


def test_reason_of_one_rank_keeps_the_host_in_all() -> None:
    assert ranks.run(3, refused) == [["rank 1: no peer access"] * 2] * 3


def absent(rank: int) -> str:
    collectives.LIMIT_S = 2.0
    if rank == 1:
        return ""
    with pytest.raises(RuntimeError) as error:
        collectives.join(Host(rank, 2), Host, "all_reduce")
    return str(error.value)


def test_absent_rank_is_named_at_the_deadline() -> None:
    assert "1" in ranks.run(2, absent)[0]


def differing(rank: int) -> str:
    host = Live(rank, 2)
    _made, host.fastkernels_collective = collectives.join(host, Host, "all_reduce")  # type: ignore[misc]
    with pytest.raises(CollectiveError) as error:
        host.all_reduce(torch.ones(3 + rank))
    assert torch.equal(host.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
    return str(error.value)


def test_other_shapes_are_an_error_in_all_ranks() -> None:
    for found in ranks.run(2, differing):
        assert "[3]" in found and "[4]" in found


def test_limit_is_the_last_size_below_which_ours_is_faster() -> None:
    faster, slower = (1e-5, 2e-5), (3e-5, 2e-5)
    assert limit((faster,) * len(SIZES)) == SIZES[-1] == 8 << 20
    assert limit((faster, faster, slower, faster), SIZES[:4]) == SIZES[1]
    assert limit((slower, faster), SIZES[:2]) == -1
    assert limit(((2e-5, 2e-5),), SIZES[:1]) == -1  # no slower is not faster


def times(rank: int) -> Any:
    mine = _Found(times=((1e-5 * (rank + 1), 3e-5), (4e-5, 2e-5 / (rank + 1))))
    return agreed(dist.group.WORLD, mine).times


def test_slowest_rank_counts() -> None:
    assert ranks.run(2, times) == [((2e-5, 3e-5), (4e-5, 2e-5))] * 2


def test_only_sums_that_our_kernels_compute_are_taken() -> None:
    ours = Ours("tp", 64)
    assert ours.takes(torch.ones(8)) and not ours.takes(torch.ones(17))
    assert not ours.takes(torch.ones(8, dtype=torch.int64)) and not ours.takes(torch.ones(4, 4).t())


def test_context_of_a_capture_is_the_hosts() -> None:
    custom = SimpleNamespace(disabled=False, capture=lambda: "theirs")
    assert collectives.capture_of(SimpleNamespace(ca_comm=custom))() == "theirs"
    custom.disabled = True
    with collectives.capture_of(SimpleNamespace(ca_comm=custom))():
        pass
