"""Our collectives in a host's tensor-parallel group: join it in all ranks, and measure for which messages ours is used.

All ranks of the group come here at the same point of a patch. Each learns what the others have found, so that all
change the host or none does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastkernels.core import parallel
from fastkernels.core.communicator import Communicator
from fastkernels.overrides.collective.in_hosts import Ours
from fastkernels.overrides.collective.measure import SIZES, Sum, Times, limit, measure
from fastkernels.overrides.expert_parallel.measure import EXPERT_SIZES, measure_experts

LIMIT_S = 60.0  # a rank may be so late
NOT_FASTER = "for no message faster than the host's here"
_numbers = itertools.count()


@dataclass(frozen=True)
class _Found:
    """One rank's finding: why it keeps the host's code, or the times of each measured message (ours, the host's)."""

    reason: str = ""
    times: Times = ()


def join(
    communicator: Any, host_class: Any, op: str, everywhere: bool = False, sums_in_place: bool = True
) -> tuple[Communicator, Ours] | str:
    """Join the group of a host's communicator for sums; why all ranks keep the host's code, if they do.

    communicator  has cpu_group (gloo), device_group, device, world_size and rank_in_group
    everywhere    use ours for all messages that it supports, without a measurement. So it is on a CPU
    sums_in_place whether the host's sum may write into its argument, so that it is for the host's own callers alone
    Raises RuntimeError if a rank does not come in LIMIT_S.
    """

    def time_both(made: Communicator) -> _Found:
        theirs: Sum = lambda x: host_class.all_reduce(communicator, x)  # noqa: E731
        return measured(made, op, theirs, capture_of(communicator))

    joined = _join(
        communicator, lambda made: _unsupported(made, op), None if everywhere else time_both, SIZES
    )
    if isinstance(joined, str):
        return joined
    made, most, by_measurement = joined
    if by_measurement:
        made.faster[op] = most
        if not sums_in_place:
            made.of_host = partial(host_class.all_reduce, communicator)
    return made, Ours(made.name, most, host_class)


def join_experts(
    communicator: Any, host_class: Any, everywhere: bool = False
) -> tuple[Communicator, Ours] | str:
    """As `join`, for dispatch and combine of experts: `most` is of the bytes that a rank dispatches."""

    def time_both(made: Communicator) -> _Found:
        try:
            return _Found(times=measure_experts(made, partial(_host_experts, communicator, host_class)))
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            return _Found(f"a measurement failed: {str(error).splitlines()[0][:200]}")

    unsupported = partial(_unsupported, op="ep_dispatch")
    joined = _join(communicator, unsupported, None if everywhere else time_both, EXPERT_SIZES)
    return joined if isinstance(joined, str) else (joined[0], Ours(joined[0].name, joined[1], host_class))


def _host_experts(communicator: Any, host_class: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Collect the tensors of all ranks and sum the first one back, as the host does around its experts."""
    if hasattr(host_class, "all_gather_into_tensor"):  # SGLang routes after it has collected
        every = tensors[0].new_empty((communicator.world_size * len(tensors[0]), *tensors[0].shape[1:]))
        back = torch.empty_like(tensors[0])
        host_class.all_gather_into_tensor(communicator, every, tensors[0])
        host_class.reduce_scatter_tensor(communicator, back, every)
        return back
    collected = host_class.all_gatherv(communicator, tensors, 0, None)
    summed: torch.Tensor = host_class.reduce_scatterv(communicator, collected[0], 0, None)
    return summed


def leave_together(communicator: Any) -> None:
    """Wait for all ranks of the group at an undo. Raises RuntimeError if one does not come in LIMIT_S."""
    if "fastkernels_experts" not in vars(communicator):
        return  # an interrupted undo goes on, and the ranks have met
    dist.monitored_barrier(communicator.cpu_group, timedelta(seconds=LIMIT_S), wait_all_ranks=True)


def _join(
    communicator: Any,
    unsupported: Callable[[Communicator], str],
    time_both: Callable[[Communicator], _Found] | None,
    sizes: Sequence[int],
) -> tuple[Communicator, int, bool] | str:
    """(our communicator, bytes of the largest message for ours, whether it was measured), or why there is none."""
    cpu_group, device = communicator.cpu_group, torch.device(communicator.device)
    dist.monitored_barrier(cpu_group, timedelta(seconds=LIMIT_S), wait_all_ranks=True)
    made = parallel.join(
        f"host{next(_numbers)}", communicator.rank_in_group, communicator.world_size, communicator.device_group,
        str(device), LIMIT_S,
    )  # fmt: skip
    try:
        found = agreed(cpu_group, _Found(unsupported(made)))
        if not found.reason and time_both is not None and device.type != "cpu":
            found = agreed(cpu_group, time_both(made))
    except BaseException:
        made.close()
        raise
    most = limit(found.times, sizes) if found.times else 1 << 62
    if found.reason or most < 0:
        made.close()
        return found.reason or NOT_FASTER
    return made, most, bool(found.times)


def _unsupported(made: Communicator, op: str) -> str:
    """Why this rank cannot run ours at all; '' if it can."""
    if made.device.type == "cpu":
        return made.without.get("meeting", "")
    if made.device.type != "cuda":
        return f"no kernel for {made.device.type}"
    try:
        return made.connect() or ""
    except RuntimeError as error:
        return str(error).splitlines()[0][:200]


def agreed(cpu_group: Any, mine: _Found) -> _Found:
    """Combine the findings of all ranks: the first reason, or the longest times of each message."""
    every: list[Any] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(every, mine, group=cpu_group)
    for rank, found in enumerate(every):
        if found.reason:
            return _Found(f"rank {rank}: {found.reason}")
    by_size = zip(*(found.times for found in every), strict=True)
    return _Found(times=tuple((max(t[0] for t in each), max(t[1] for t in each)) for each in by_size))


def capture_of(communicator: Any) -> Callable[[], Any]:
    """The context in which the host captures graphs: its kernel then reads captured tensors in place."""
    custom = getattr(communicator, "ca_comm", None)
    if custom is None or getattr(custom, "disabled", False):
        return contextlib.nullcontext
    found: Callable[[], Any] = custom.capture
    return found


def measured(made: Communicator, op: str, theirs: Sum, capture: Callable[[], Any]) -> _Found:
    """Seconds of a call for each of SIZES, interleaved; in captured graphs on a GPU."""
    try:
        return _Found(times=measure(made, op, theirs, capture))
    except RuntimeError as error:
        return _Found(f"a measurement failed: {str(error).splitlines()[0][:200]}")
