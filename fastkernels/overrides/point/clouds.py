"""Synthetic point clouds for cases and tests: occupied cells of surfaces, as in scans of rooms and objects."""

from __future__ import annotations

import torch

DEEPEST = 16  # bits of a coordinate: codes have 3 * DEEPEST bits below the cloud's number


def scan(rows: int, clouds: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """grid_coord [rows, 3] int32 without repeated cells, and the cloud of each, [rows] int64, ascending.

    Cells are on the walls and the floor of a box with a rough surface: as in an indoor scan, about 8 of 27 neighbors of
    a cell are occupied. The side of a box follows from its number of points.
    """
    device = generator.device
    sizes = [rows // clouds + (i < rows % clouds) for i in range(clouds)]
    parts = []
    for size in sizes:
        side = 4
        while 3 * side * side < size:
            side += 1 + side // 8
        face = torch.randint(3, (4 * size + 8,), generator=generator, device=device)
        cell = torch.randint(side, (4 * size + 8, 3), generator=generator, device=device)
        rough = torch.randint(2, (4 * size + 8,), generator=generator, device=device)
        cell.scatter_(1, face[:, None], rough[:, None])
        cell = torch.unique(cell, dim=0)
        kept = torch.randperm(len(cell), generator=generator, device=device)[:size]
        parts.append(cell[kept])
    coord = torch.cat(parts) if parts else torch.zeros(0, 3, device=device)
    of = torch.arange(clouds, device=device).repeat_interleave(torch.tensor(sizes, device=device))
    return coord.int(), of


def depths_of(grid_coord: torch.Tensor, batch: torch.Tensor, clouds: int) -> torch.Tensor:
    """The bits that the largest coordinate of each cloud needs, [clouds] int64; 0 for a cloud of one cell."""
    largest = grid_coord.new_zeros(clouds, dtype=torch.int64)
    if len(grid_coord):
        largest.scatter_reduce_(0, batch, grid_coord.amax(1).long(), "amax")
    bits = torch.arange(DEEPEST + 1, device=batch.device)
    return (largest[:, None] >= (1 << bits)).sum(1)
