"""Run a function in several processes that form a group, as the ranks of a host do."""

from __future__ import annotations

import multiprocessing as mp
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = [
    "torch",
    "torch.distributed",
    "fastkernels.core.parallel",
    "fastkernels.overrides.collective.all_reduce",
]


def run(
    size: int, function: Callable[..., Any], *args: Any, late_s: float = 60.0, timeout: float = 120.0,
    device: str = "cpu",
) -> list[Any]:  # fmt: skip
    """function(rank, *args) of each rank, in a gloo group; None of a rank that died. Raises AssertionError.

    late_s: seconds that a rank may be late in a collective. device: with 'cuda' each rank has a GPU, in an NCCL group
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(False)
            process = context.Process(
                target=_rank,
                args=(theirs, rank, size, str(Path(folder) / "store"), late_s, device, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        found: list[Any] = []
        try:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout), f"rank {rank} gave no answer in {timeout:g} s"
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = True, None
                assert ok, f"rank {rank}: {value}"
                found.append(value)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found


def _rank(
    pipe: Any, rank: int, size: int, store: str, late_s: float, device: str, function: Any, args: Any
) -> None:
    import torch
    import torch.distributed as dist

    from fastkernels.core import parallel

    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
            device = f"cuda:{rank}"
        parallel.init(rank, size, f"file://{store}", device=device, timeout=late_s)
        pipe.send((True, function(rank, *args)))
        parallel.reset()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    sys.stdout.flush()
