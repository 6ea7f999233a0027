"""Whether every rank of a host's process group has loaded the patch, wherever it runs.

Ranks meet in the store of torch's default process group. A node without FASTKERNELS=1, or without FastKernels, would
otherwise run the host's modules, and the patched ranks would wait for it.
"""

from __future__ import annotations

import datetime
from typing import Any

from fastkernels.patch import PatchError

LIMIT_S = (
    60.0  # ranks announce themselves between two points at which the host makes them wait for each other
)


def announce(host: str) -> None:
    """Tell the other ranks that this one loads the patch."""
    store, rank, _ = _group()
    if store is not None:
        store.set(_key(host, rank), "1")


def check(host: str, limit_s: float = LIMIT_S) -> None:
    """Raise PatchError with the ranks that have not announced themselves within the limit."""
    store, _, world = _group()
    if store is None:
        return
    keys = [_key(host, rank) for rank in range(world)]
    try:
        store.wait(keys, datetime.timedelta(seconds=limit_s))
    except RuntimeError:  # a timeout
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if absent:
            ranks = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {absent} have"
            raise PatchError(
                f"{ranks} not loaded the patch: set FASTKERNELS=1 on every node, and install FastKernels there"
            ) from None


def _key(host: str, rank: int) -> str:
    return f"fastkernels/{host}/{rank}"


def _group() -> tuple[Any, int, int]:
    """(store, rank, ranks) of the default process group; None for the store of one process."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None, 0, 1
    return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
