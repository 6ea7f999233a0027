"""Collectives of a host's groups of ranks, by ours or by the host's own code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.core import parallel
from fastkernels.overrides.collective import exchange, words
from fastkernels.overrides.collective.all_gather import all_gather
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.collective.reduce_scatter import reduce_scatter


@dataclass(frozen=True)
class Ours:
    """The attribute `fastkernels_collective` of a patched communicator of a host, or `fastkernels_experts`.

    group  the name of its Communicator
    most   bytes of the largest message that is ours; of experts: that a rank dispatches
    host   the host's class; None: the base of the communicator's
    """

    group: str
    most: int
    host: Any = None

    def takes(self, x: torch.Tensor) -> bool:
        # Not nbytes, which a compiler cannot trace for symbolic sizes.
        return x.numel() * x.element_size() <= self.most and x.dtype in exchange.SUMS and x.is_contiguous()

    def class_of(self, communicator: Any) -> Any:
        """The class with the host's methods."""
        return type(communicator).__base__ if self.host is None else self.host


def summed(communicator: Any, x: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' x in a new tensor. The host's method adds messages that are not ours."""
    ours: Ours = communicator.fastkernels_collective
    if ours.takes(x):
        return all_reduce(x, ours.group)
    theirs: torch.Tensor = ours.class_of(communicator).all_reduce(communicator, x)
    return theirs


def gathers(ours: Ours, tensors: Sequence[torch.Tensor], sizes: Sequence[int] | None) -> bool:
    """Whether ours collects these tensors. All ranks decide the same, because their tensors have the same sizes."""
    if torch.compiler.is_compiling() or (sizes is not None and any(size != sizes[0] for size in sizes)):
        return False  # a compiler sees the host's opaque op
    if not tensors[0].shape[0] or sum(t.nbytes for t in tensors) > ours.most:
        return False
    comm = parallel.communicator(ours.group)
    if comm.symmetric is None:
        return comm.device.type == "cpu" and all(t.shape[0] == tensors[0].shape[0] for t in tensors)
    return words.not_gathered(list(tensors), comm.size) is None


def gathered(
    ours: Ours, tensors: Sequence[torch.Tensor], outs: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """All ranks' tensors [T, ...] one behind the other in order of rank: by one kernel on a GPU, see `gathers`."""
    comm = parallel.communicator(ours.group)
    if comm.symmetric is not None:
        comm.arrive("all_gather", *tensors)
        return words.gather_words(list(tensors), comm.symmetric, outs)
    found = exchange.gathered_tensors("ep_dispatch", all_gather, tensors, ours.group)
    if outs is None:
        return found
    for out, t in zip(outs, found, strict=True):
        out.copy_(t.view(out.shape))
    return outs


def scatters(ours: Ours, x: torch.Tensor, sizes: Sequence[int] | None) -> bool:
    """Whether ours sums x over the ranks for `scattered`."""
    size = parallel.communicator(ours.group).size
    if torch.compiler.is_compiling() or (sizes is not None and any(n != sizes[0] for n in sizes)):
        return False
    whole = x.shape[0] % size == 0 and x.shape[0] > 0 and x.is_contiguous()
    return whole and x.dtype in exchange.SUMS and x.nbytes <= size * ours.most


def scattered(ours: Ours, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's part of the rows of the sum of all ranks' x."""
    comm = parallel.communicator(ours.group)
    if out is not None and comm.symmetric is not None and words.is_small(x, ours.group, comm.size):
        comm.arrive("reduce_scatter", x)
        return words.scatter_words(x, comm.symmetric, out)
    found = reduce_scatter(x, ours.group)
    return found if out is None else out.copy_(found.view(out.shape))
