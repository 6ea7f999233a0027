"""Reads what the peers have passed in shared memory before it returns."""

from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    ranks = parallel.communicator(group)
    parts = ranks.exchange("all_reduce", x.contiguous())
    out = parts[0].clone()
    for part in parts[1:]:
        out.add_(part)
    return out
