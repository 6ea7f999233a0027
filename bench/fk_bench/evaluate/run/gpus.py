"""Items on all GPUs of this machine: each is this command with `--item`, on GPUs and cores of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from fk_bench.core.rows import Row
from fk_bench.evaluate.run.cluster import Job, Lost, measured


def run(jobs: Sequence[Job], gpus: Sequence[str], arrived: Callable[[Job, list[Row] | Lost], None]) -> None:
    """Run all jobs, those with most GPUs first, and pass on the rows of each when it ends."""
    waiting = sorted(jobs, key=lambda job: -job.gpus)
    free = list(gpus)
    running: dict[Future[list[str]], tuple[Job, list[str]]] = {}
    cores = shares(len(gpus))
    with ThreadPoolExecutor(len(gpus)) as pool:
        while waiting or running:
            for job in [j for j in waiting if j.gpus > len(gpus)]:
                waiting.remove(job)
                arrived(job, Lost(f"it needs {job.gpus} GPUs, and this machine has {len(gpus)}"))
            while (fitting := next((j for j in waiting if j.gpus <= len(free)), None)) is not None:
                waiting.remove(fitting)
                mine, free = free[: fitting.gpus], free[fitting.gpus :]
                own = {core for gpu in mine for core in cores[gpus.index(gpu)]}
                future = pool.submit(measured, fitting, {"CUDA_VISIBLE_DEVICES": ",".join(mine)}, own)
                running[future] = fitting, mine
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                job, mine = running.pop(future)
                free = [g for g in gpus if g in free or g in mine]
                try:
                    found: list[Row] | Lost = [Row.model_validate_json(line) for line in future.result()]
                except (Lost, OSError, ValueError) as error:
                    found = error if isinstance(error, Lost) else Lost(f"{type(error).__name__}: {error}")
                arrived(job, found)


def shares(count: int) -> list[set[int]]:
    """The cores of this process in `count` parts of neighbours; all of them for each if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // count
    return [set(cores[i * each : (i + 1) * each]) if each else set(cores) for i in range(count)]
