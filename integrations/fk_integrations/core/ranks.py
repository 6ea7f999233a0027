"""One rank of a group makes a text, and all ranks of the group get it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch


def agree(group: Any, make: Callable[[], str], seconds: float) -> str:
    """Return what `make` returns in the group's first rank; only that rank calls it.

    group    a process group for tensors on the CPU; None for a process alone
    seconds  how long the other ranks wait

    Raises RuntimeError where nothing arrives in time; the first rank raises what `make` raises, after it told others.
    """
    if group is None or (size := torch.distributed.get_world_size(group)) == 1:
        return make()
    first = torch.distributed.get_global_rank(group, 0)
    error: Exception | None = None
    text = b""
    if torch.distributed.get_rank(group) == 0:
        try:
            text = make().encode() + b"\n"  # an empty tensor cannot be sent
        except Exception as failure:
            error = failure
    length = torch.tensor([-1 if error else len(text)], dtype=torch.int64)
    _send(length, first, group, seconds, size)
    if error is not None:
        raise error
    if int(length) < 0:
        raise RuntimeError(f"rank {first}, which measures for its group of {size}, failed")
    data = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8)
    _send(data, first, group, seconds, size)
    return data.numpy().tobytes().decode()[:-1]


def _send(tensor: torch.Tensor, first: int, group: Any, seconds: float, size: int) -> None:
    work: Any = torch.distributed.broadcast(tensor, first, group=group, async_op=True)
    try:
        done = work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        done, reason = False, str(error).splitlines()[0]
    else:
        reason = "no answer"
    if not done:
        raise RuntimeError(
            f"rank {first}, which measures for its group of {size}, sent nothing in {seconds:.0f} s: {reason}"
        )
