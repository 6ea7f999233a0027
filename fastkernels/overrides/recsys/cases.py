"""Synthetic inputs of recommenders: ids of a categorical feature, and graphs of users and items.

The skew is that of public data: in the Criteo sets and in MovieLens, Gowalla or Amazon-Book, the number of times that
an id occurs falls roughly as a power of its rank. The same generator gives the same values.
"""

from __future__ import annotations

import torch

SKEW = 1.05  # exponent of Zipf's law
_STEP = 2_654_435_761  # spreads neighbouring ranks over a table; prime


def zipf(count: int, rows: int, generator: torch.Generator, skew: float = SKEW) -> torch.Tensor:
    """Ids [count] int64 from 0 to rows - 1. An id of rank r occurs in proportion to r ** -skew; ranks are spread out.

    Raises ValueError for a table without rows, and for a skew of 1 or less.
    """
    if rows < 1 or skew <= 1:
        raise ValueError(f"zipf needs at least one row and a skew over 1, got {rows} rows and skew {skew}")
    u = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
    # The inverse of the cumulative distribution of a power law between 1 and rows + 1
    last = float(rows + 1) ** (1 - skew)
    rank = ((last - 1) * u + 1) ** (1 / (1 - skew))
    return (rank.long().clamp_(1, rows) - 1) * _STEP % rows


def bipartite(
    users: int, items: int, edges: int, generator: torch.Generator, skew: float = SKEW
) -> torch.Tensor:
    """Edges [2, 2 * edges] int64 of an undirected graph: users are nodes 0 to users - 1, items follow.

    Users are drawn uniformly, items by Zipf's law. An edge may occur twice. Nodes may be isolated.
    """
    device = generator.device
    user = torch.randint(users, (edges,), generator=generator, device=device)
    item = zipf(edges, items, generator, skew) + users
    return torch.stack((torch.cat((user, item)), torch.cat((item, user))))
