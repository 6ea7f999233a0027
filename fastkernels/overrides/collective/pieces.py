"""Products of prompts in pieces: while one piece is computed, another one passes between the ranks.

The process group works on a stream of its own. A piece starts when its rows are ready, and the current stream waits for
all pieces at the end, so that this can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fastkernels.core import parallel
from fastkernels.core.communicator import Communicator
from fastkernels.core.dispatch import Provider
from fastkernels.overrides.collective import exchange

PIECES = ({"number": 2}, {"number": 4}, {"number": 8})
LEAST_ROWS = 256  # of a piece: fewer do not fill the chip's tiles


def bounds(rows: int, pieces: int) -> list[tuple[int, int]]:
    """[first, end) of so many pieces, of whole tiles of 128 rows if there are enough."""
    tile = 128 if rows >= 128 * pieces else 1
    each = -(-rows // (pieces * tile)) * tile
    return [(at, min(at + each, rows)) for at in range(0, rows, each)]


@contextmanager
def started(comm: Communicator, op: str) -> Iterator[Callable[[Any], None]]:
    """A function that takes collectives in flight; the current stream waits for all of them at the end."""
    works: list[Any] = []
    with comm.naming(op):
        yield works.append
        for work in works:
            work.wait()


def scatter(out: torch.Tensor, x: torch.Tensor, comm: Communicator) -> Any:
    """Start to sum x of all ranks, of which this rank's part comes into out."""
    # The name in torch 2.13, and the one in older versions.
    start: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return start(out, x, group=comm.process_group, async_op=True)


def gather(out: torch.Tensor, x: torch.Tensor, comm: Communicator) -> Any:
    """Start to collect x of all ranks in out."""
    start: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return start(out, x, group=comm.process_group, async_op=True)


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x [T, K] times weight [N, K] transposed, into out [T, N]."""
    torch.mm(x, weight.t(), out=out)


def overlapped(fn: Callable[..., torch.Tensor], divided: bool = False) -> Provider:
    """The provider of a product in pieces. divided: each rank gets its part of the rows, and the pieces are of that."""

    def rows(x: torch.Tensor, group: str) -> int:
        return len(x) // parallel.communicator(group).size if divided else len(x)

    def supports(x: torch.Tensor, weight: torch.Tensor, group: str = "tp") -> str | None:
        return _unsupported(x, weight, rows(x, group), group)

    def fits(params: dict[str, int], x: torch.Tensor, weight: torch.Tensor, group: str = "tp") -> bool:
        """Whether so many pieces are worth a trial."""
        return rows(x, group) >= params["number"] * LEAST_ROWS

    return Provider("overlapped", fn, devices=exchange.BOTH, supports=supports, params=PIECES, fits=fits)


def _unsupported(x: torch.Tensor, weight: torch.Tensor, rows: int, group: str) -> str | None:
    """Why a product is not computed in pieces."""
    if parallel.communicator(group).size == 1:
        return "for a group of several ranks"
    if x.dim() != 2 or weight.dim() != 2 or x.dtype != weight.dtype:
        return f"takes two matrices of one dtype, got {tuple(x.shape)} {x.dtype}, {tuple(weight.shape)} {weight.dtype}"
    if rows < 2:
        return f"{rows} rows are one piece"
    return None


def number_of(rows: int) -> int:
    """Pieces without a choice by measurement."""
    return max(2, min(4, rows // (2 * LEAST_ROWS)))
