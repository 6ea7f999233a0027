"""A group over two machines, simulated on this one: each node has an address of its own and sees only its own ranks."""

from __future__ import annotations

import multiprocessing as mp
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastkernels.core import communicator, parallel, registry
from fastkernels.overrides.collective.all_reduce import BETWEEN

SIZE, EACH = 4, 2
OTHER = r"rank 2: all_reduce\(float32 \[4, 33\]\); rank 3: all_reduce\(float32 \[4, 32\]\)"


def _rank(pipe: Any, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    node = rank // EACH
    communicator._machine = lambda: f"node{node}"
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=f"127.0.0.{2 + node}")]
    options._timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.2:{port}", rank=rank, world_size=SIZE, pg_options=options
    )
    parallel.init(rank, SIZE, device="cpu", timeout=60.0)
    comm = parallel.communicator()
    assert comm.meeting is None and comm.nodes is not None and "another machine" in comm.without["meeting"]
    comm.device = torch.device("cuda")  # which would have no buffers of a rank on the other node
    assert "for one machine: rank" in str(comm.connect())
    comm.device = torch.device("cpu")
    inside = comm.nodes.inside
    assert (inside.rank, inside.size) == (rank % EACH, EACH) and inside.meeting is not None
    assert dist.get_process_group_ranks(comm.nodes.between) == [rank % EACH, EACH + rank % EACH]
    op = registry.get("all_reduce").op
    sums = []
    for n in (1, 63, 4096, BETWEEN, BETWEEN + 1):  # of float32; the last ones are parts between the nodes
        every = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(SIZE)]
        got = op(every[rank], "tp")
        torch.testing.assert_close(got, sum(every[1:], every[0]), atol=1e-5, rtol=1e-5)
        sums.append(got.double().sum().item())
    with pytest.raises(communicator.CollectiveError, match=OTHER) as error:
        op(torch.ones(4, 32 if rank == 3 else 33), "tp")
    assert (error.value.rank, error.value.fatal) == (None if rank == 3 else 3, False)
    got = parallel.all_gather(torch.full((2, 3), float(rank)), 0)
    assert got[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    pipe.send((sums, dict(op.fallbacks)))
    parallel.reset()
    assert inside.meeting is None  # freed with the group
    dist.destroy_process_group()


@pytest.mark.slow
def test_sums_go_through_each_node_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    context, pipes, processes = mp.get_context("spawn"), [], []
    for rank in range(SIZE):
        ours, theirs = context.Pipe(False)
        process = context.Process(target=_rank, args=(theirs, rank, port), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        found = []
        for pipe in pipes:
            assert pipe.poll(120)
            found.append(pipe.recv())
        assert all(each == found[0] for each in found) and not found[0][1]  # equal bits, and no fallback
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("machines", "each"),
    [([], 0), (["a", "b"], 1), (["a", "a", "b", "b"], 2), (["a", "b", "a", "b"], 0), (["a", "a", "b"], 0)],
)
def test_ranks_of_a_machine_are_neighbours(machines: list[str], each: int) -> None:
    assert parallel._ranks_of_a_machine(machines) == each
