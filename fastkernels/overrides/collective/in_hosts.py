"""The all-reduce of a host's tensor-parallel group, by ours or by the host's own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.all_reduce import all_reduce


@dataclass(frozen=True)
class Ours:
    """The attribute `fastkernels_collective` of a patched communicator of a host.

    group  the name of its Communicator; most: bytes of the largest message that is ours
    """

    group: str
    most: int

    def takes(self, x: torch.Tensor) -> bool:
        return x.nbytes <= self.most and x.dtype in exchange.SUMS and x.is_contiguous()


def summed(communicator: Any, x: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' x in a new tensor. The host's method adds messages that are not ours."""
    ours: Ours = communicator.fastkernels_collective
    if ours.takes(x):
        return all_reduce(x, ours.group)
    host: Any = type(communicator).__base__
    theirs: torch.Tensor = host.all_reduce(communicator, x)
    return theirs
