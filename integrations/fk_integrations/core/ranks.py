"""One rank of a group makes a text, and all ranks of the group get it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

MARGIN = 10.0  # seconds between the end of one rank's time and of another's, on a busy machine


def agree(group: Any, make: Callable[[], str], seconds: float) -> str:
    """Return what `make` returns in the group's first rank; only that rank calls it.

    group    a process group for tensors on the CPU; None for a process alone
    seconds  how long `make` may take, from the moment that all ranks are here

    Either all ranks return or all raise RuntimeError; the first rank raises what `make` raises, after it told others.
    """
    if group is None or (size := torch.distributed.get_world_size(group)) == 1:
        return make()
    first = torch.distributed.get_global_rank(group, 0)
    late = f"rank {first}, which measures for its group of {size}, sent nothing in {seconds:.0f} s"
    _all_here(group, seconds + MARGIN, size)  # so that no rank's time begins before another's
    error: Exception | None = None
    text, began = b"", time.monotonic()
    if torch.distributed.get_rank(group) == 0:
        try:
            text = make().encode() + b"\n"  # an empty tensor cannot be sent
        except Exception as failure:
            error = failure
        if (taken := time.monotonic() - began) > seconds + MARGIN:
            raise RuntimeError(f"{late}: it took {taken:.0f} s") from error  # the others have raised
        if error is None and taken > seconds:
            error = RuntimeError(f"{late}: it took {taken:.0f} s")
    length = torch.tensor([-1 if error else len(text)], dtype=torch.int64)
    _send(length, first, group, seconds + 2 * MARGIN, late)
    if error is not None:
        raise error
    if int(length) < 0:
        raise RuntimeError(f"rank {first}, which measures for its group of {size}, failed")
    data = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8)
    _send(data, first, group, seconds + 2 * MARGIN, late)
    return data.numpy().tobytes().decode()[:-1]


def _all_here(group: Any, seconds: float, size: int) -> None:
    work = torch.distributed.all_reduce(torch.ones(1), group=group, async_op=True)
    _wait(work, seconds, f"a rank of the group of {size} has not come in {seconds:.0f} s")


def _send(tensor: torch.Tensor, first: int, group: Any, seconds: float, late: str) -> None:
    _wait(torch.distributed.broadcast(tensor, first, group=group, async_op=True), seconds, late)


def _wait(work: Any, seconds: float, late: str) -> None:
    try:
        done = work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        done, reason = False, str(error).splitlines()[0]
    else:
        reason = "no answer"
    if not done:
        raise RuntimeError(f"{late}: {reason}")
