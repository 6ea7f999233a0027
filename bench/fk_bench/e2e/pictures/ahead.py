"""Compilation before a measurement: code of several lanes and batches at once, for the compiler's caches on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch._inductor.config as inductor

from fk_bench.e2e.pictures import subjects
from fk_bench.e2e.pictures.measure import Settings, run_compiled


def fill(
    opened: tuple[Any, ...], channels_last: bool, settings: Settings, processes: int, say: Callable[[str], None]
) -> None:  # fmt: skip
    """Compile each compiled lane for each batch size, `processes` at once, all with a copy of the model.

    opened: the arguments of open_subject. An error is reported only: the measurement meets it again.
    """
    jobs = [
        (name, batch) for batch in settings.batches for name in settings.lanes if name.endswith("compiled")
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(cores // max(min(processes, len(jobs)), 1), 1)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(_compile, opened, channels_last, settings, threads, *job) for job in jobs]
        for (name, batch), future in zip(jobs, found, strict=True):
            error = future.exception()
            say(f"batch {batch}, {name}: {f'not compiled ahead: {error}' if error else 'compiled ahead'}")


def _compile(
    opened: tuple[Any, ...], channels_last: bool, settings: Settings, threads: int, name: str, batch: int
) -> None:  # fmt: skip
    inductor.compile_threads = threads
    subject = subjects.open_subject(*opened)
    if channels_last:
        subject.channels_last()
    run_compiled(subject, settings, name, batch)
    torch.compiler.reset()
