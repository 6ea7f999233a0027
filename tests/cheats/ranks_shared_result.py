"""Returns memory that the ranks share, which the call after the next overwrites."""

import torch

from fastkernels.core import parallel


def all_gather(x, group="tp"):
    ranks = parallel.communicator(group)
    parts = ranks.exchange("all_gather", x.contiguous())
    one = ranks.meeting.buffer(0, 0).untyped_storage()
    first, step = ranks.meeting.buffer(0, 0), 2 * ranks.meeting.half // x.element_size()
    if x.shape[0] != 1 or len(parts) != ranks.size:
        return torch.cat(parts)
    flat = torch.empty(0, dtype=x.dtype).set_(
        one, first.storage_offset() // x.element_size(), (ranks.size, x.shape[1]), (step, 1)
    )
    flat[ranks.rank].copy_(x[0])
    return flat
